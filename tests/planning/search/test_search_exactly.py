"""A search finds the fastest of all tables, by brute force over them; says what fits where none does; and repeats."""

from dataclasses import replace
from math import inf

import pytest
from testkit.four_ranks import drafted, with_cores
from testkit.profiles import share
from testkit.search_cases import (
    PricedTable,
    SearchCase,
    auto_config,
    priced_tables,
    random_case,
    space_of_setting,
    spec_of,
    tables_of,
    with_memory,
    with_profiles,
)
from testkit.sim_helpers import linear_file

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.planning.memory.memory_budget import MemoryRefusal
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.price import Price, bound_seconds, with_schedules
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.search import search
from rlhfuse.planning.search.search import TOP, FastestTables, Ranking
from rlhfuse.schedule.ir.evaluate import loosen
from rlhfuse.schedule.rules.builders import min_memory

SPEC = spec_of(4, 512, 8, 4)
SPECS = dict.fromkeys(("actor", "critic", "reference", "reward"), SPEC)


def bounded(one: PricedTable) -> Price:
    """With training at its bound."""
    minibatch = bound_seconds(one.draft)
    return with_schedules(one.draft, one.price.generation, one.price.moves, minibatch)


def found_of(case: SearchCase, top: int = 5) -> FastestTables:
    return Ranking(case.setting).fastest(top)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Every table is reached that may be faster at all."""
    monkeypatch.setattr(search, "WORTH_REACHING", 0.0)


def check_exact(case: SearchCase, top: int = 5) -> int:
    """How many tables fit."""
    every = priced_tables(case)
    if not every:
        with pytest.raises(InputError):
            found_of(case, top)
        return 0
    found = found_of(case, top)
    assert [row.table.text for row in found.rows] == [one.table.text for one in every[:top]]
    assert [row.price for row in found.rows] == [one.price for one in every[:top]]
    assert found.reached == (every[top].price.seconds if len(every) > top else inf)
    assert found.bound <= min((bounded(one).seconds * (1 + 1e-9) for one in every[top:]), default=inf)
    space = space_of_setting(case.setting)
    assert (found.training_rows, found.generation_rows) == (len(space.training), len(space.generation))
    assert len(found.rows) <= found.priced <= found.drafted <= found.training_rows * found.generation_rows
    for row, one in zip(found.rows, every):
        memory = one.draft.memory
        assert row.needed_bytes == memory.needed(memory.fullest(row.price.activations)) <= loosen(memory.cap)
        assert row.limit_bytes == memory.limit
    return len(every)


@pytest.mark.parametrize("seed", range(share(60)))
def test_the_search_is_exact(seed, monkeypatch):
    """A CPU run has a core for each rank, or shares two."""
    with_cores(monkeypatch, (2.0, 64.0)[seed % 2])
    check_exact(random_case(seed), top=(5, 1, 5)[seed % 3])


@pytest.mark.parametrize("seed", range(share(10)))
def test_the_search_is_exact_with_measured_costs(seed, tmp_path):
    check_exact(with_profiles(random_case(seed + 200), tmp_path / "profile.json", seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300, 360))
def test_the_search_of_a_larger_space_is_exact(seed):
    check_exact(random_case(seed, (4, 8, 16), most_tables=1500))


def test_ties_are_broken_by_the_text(monkeypatch):
    """Where costs of generation and of training are all alike every table is as good as any other."""
    keys = {"fusion__actor_microbatches": 2, "parallel__critic_train": "d2t2p1"}
    case = SearchCase(auto_config(trainer__hardware="h100", **keys), SPECS, 4, None)
    ranking = Ranking(case.setting)
    made = replace(next(ranking.ranked())[0].price, schedules=0.0)
    for floor in ("_by_work", "_by_split", "_by_order", "_by_room", "_training_floor", "_generation_floor", "_with"):
        monkeypatch.setattr(Ranking, floor, lambda self, *given: 0.0)
    for priced in ("price", "with_schedules"):
        monkeypatch.setattr(search, priced, lambda *given: made)
    found = Ranking(case.setting).fastest(TOP)
    texts = sorted(table.text for table in tables_of(ranking.space))
    assert [row.table.text for row in found.rows] == texts[:5] and found.reached == made.seconds


@pytest.mark.parametrize("seed", range(share(20)))
def test_the_plan_of_the_best_takes_what_the_search_says(seed):
    """With what most leave as it is: backwards split where that helps, lengths are assumed."""
    case = replace(random_case(seed + 600), lengths=None)
    fusion = {"intra_stage": "search", "split_backward": "auto", "search_seconds": 2.0}
    case = replace(case, config=case.config.with_(fusion=fusion, trainer={"memory_limit_gb": 0.0}))
    best = found_of(case, 1).best
    plan = PlanReport.of(make_plan(drafted(best.table.of(case.config), case.specs, case.world_size)))
    assert best.bound * (1 - 1e-9) <= plan.seconds.fused <= best.seconds * (1 + 1e-9)


def test_what_is_not_reached_saves_less_than_is_worth_reaching(monkeypatch):
    """Fewer tables are reached, and the best of them is within that of the best of all; bounds are those of all."""
    monkeypatch.setattr(search, "WORTH_REACHING", 0.1)
    fewer = 0
    for seed in (1, 2, 3, 8, 13, 21):
        case = random_case(seed, most_tables=60)
        every = priced_tables(case)
        if every:
            found = found_of(case, 1)
            assert found.best.seconds * 0.9 <= every[0].price.seconds * (1 + 1e-9) <= found.best.seconds * (1 + 2e-9)
            others = [bounded(one).seconds for one in every if one.table != found.best.table]
            assert found.bound <= min(others, default=inf) * (1 + 1e-9)
            fewer += len(every) - found.priced
    assert fewer > 0


# nothing fits ----------------------------------------------------------------------------------------------------


def least_missing(case: SearchCase) -> tuple[float, str]:
    """Bytes that the table lacks that lacks least, and the table; `parallel.headroom` is 0."""
    found = []
    for table in tables_of(space_of_setting(case.setting)):
        with pytest.raises(MemoryRefusal) as caught:
            case.setting.draft(table)
        found.append((caught.value.missing_bytes, table.text, str(table)))
    missing, _, table = min(found)
    return missing, table


def needed_beside_generation(one: PricedTable) -> int:
    memory = one.draft.memory
    phases = memory.phases(min_memory(one.draft.training.problem))
    return max(memory.needed(phase) for phase in phases if phase.phase != "generation")


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
@pytest.mark.parametrize("share", [0.7, 0.97])
def test_where_nothing_fits_the_closest_table_is_named_with_what_it_lacks(hardware, share):
    keys = {"trainer__hardware": hardware, "fusion__actor_microbatches": 2, "parallel__sequence_parallel": False}
    keys |= {"parallel__critic_train": "d2t2p1"}
    case = SearchCase(auto_config(**keys), SPECS, 4, None)
    if hardware == "h100":  # what is as large as memory allows, or rests on the host
        config = case.config.with_(rollout={"kv_blocks_per_instance": 64}, trainer={"offload_optimizer": "false"})
        case = replace(case, config=config)
    needs = [needed_beside_generation(one) for one in priced_tables(with_memory(case, 100.0))]
    process = case.setting.inputs.hardware.process_bytes
    case = with_memory(case, (process + share * (min(needs) - process)) / 1e9)
    missing, table = least_missing(case)
    with pytest.raises(InputError) as caught:
        found_of(case)
    text = str(caught.value)
    assert text.startswith(f"memory: no layouts fit 4 ranks of {hardware}: the closest, {table}, lacks ")
    assert f"lacks {readable_bytes(missing)} of a rank in " in text and "\n" not in text
    gigabytes = case.config.trainer.memory_limit_gb + missing / 1e9 * 1.0001
    assert found_of(with_memory(case, gigabytes)).best.table in set(tables_of(space_of_setting(case.setting)))


def test_where_memory_is_not_what_refuses_the_first_reason_is_told():
    keys = {"parallel__actor_train": "d1t1p4", "parallel__critic_train": "d2t1p2"}
    with pytest.raises(InputError) as caught:
        found_of(SearchCase(auto_config(fusion__intra_stage="time_sharing", **keys), SPECS, 4, None))
    text = str(caught.value)
    assert text.startswith("no layouts can run on 4 ranks: ") and "\n" not in text
    assert "fusion.intra_stage; the first: fusion.intra_stage=time_sharing: " in text
    assert text.endswith("or set fusion.intra_stage=search")


def test_degrees_that_were_not_measured_are_told(tmp_path):
    case = SearchCase(auto_config(parallel__generation="d1t4p1"), SPECS, 4, None)
    profiled = (with_profiles(case, tmp_path / f"{seed}.json", seed) for seed in range(10))
    case = next(one for one in profiled if one.setting.inputs.measured.degrees == (1, 2))
    with pytest.raises(InputError, match=r" [0-9]+ not measured; the first: .*parallel\.generation=d1t4p1 needs 4"):
        found_of(case)


# headroom --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_headroom_is_left_in_every_phase(hardware, share):
    keys = {"trainer__hardware": hardware, "fusion__actor_microbatches": 2, "trainer__recompute": "full"}
    keys |= {"parallel__critic_train": "d2t2p1"}
    case = SearchCase(auto_config(**keys), SPECS, 4, None)
    found = found_of(with_memory(case, 100.0))
    tight = with_memory(case, found.best.needed_bytes * (1.25 if share < 0.3 else 1.6) / 1e9)
    roomy = replace(tight, config=tight.config.with_(parallel={"headroom": share}))
    assert found_of(tight).best.seconds <= found_of(roomy).best.seconds
    for row in found_of(roomy).rows:
        memory = roomy.setting.draft(row.table).memory
        assert memory.cap == (1 - share) * memory.limit
        assert all(memory.needed(phase) <= loosen(memory.cap) for phase in memory.phases(row.price.activations))
    check_exact(roomy)


# the same everywhere ---------------------------------------------------------------------------------------------


SEARCHES = """
from testkit.search_cases import random_case
from planning import test_settle
from planning.search import test_search_exactly
print(*(repr(test_search_exactly.found_of(random_case(seed))) for seed in (4, 8)))
print(*test_settle.settled(test_settle.everything()).lines)
"""


def test_all_ranks_of_any_hash_seed_find_the_same(programs):
    ranks = dict(WORLD_SIZE="4", LOCAL_WORLD_SIZE="4", MASTER_ADDR="localhost")
    launched = [{}, {"RANK": "0", "LOCAL_RANK": "0", **ranks}, {"RANK": "3", "LOCAL_RANK": "3", **ranks}]
    said = [programs.python("-c", SEARCHES, PYTHONHASHSEED=str(seed), **one) for seed, one in enumerate(launched, 1)]
    assert len({one.stdout for one in said}) == 1 and said[0].returncode == 0, said[0].stderr
    assert said[0].stdout.count("FastestTables(") == 2 and "layouts of the search" in said[0].stdout


def test_a_cost_for_one_table_alone_is_refused(tmp_path):
    write_json(tmp_path / "costs.json", linear_file().to_dict())
    config = auto_config(fusion__profile=str(tmp_path / "costs.json"))
    with pytest.raises(InputError, match="was measured by a run in its layouts and says nothing of others"):
        SearchCase(config, SPECS, 4, None).setting
