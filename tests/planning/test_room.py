"""A plan that fits, fits: no phase is above its headroom, what is too full is said or refused, and with what helps."""

import json
from dataclasses import replace

import pytest
from testkit.four_ranks import SPECS, drafted, planned, run, shared_plan
from testkit.plan_sweep import plan_of
from testkit.sim_helpers import linear_cost, linear_file

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.config.load import load_config
from rlhfuse.costs.hardware import hardware_by_name, load_hardware, save_hardware
from rlhfuse.costs.profiled import made_for
from rlhfuse.decisions.layouts import given_tasks, planned_world_size
from rlhfuse.planning.job import Job
from rlhfuse.planning.memory.memory_plan import NEARLY_FULL
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.search.search import Ranking
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.settle import settle, settle_but_layouts
from rlhfuse.planning.training.passing import with_room
from rlhfuse.planning.training.training_orders import short_search
from rlhfuse.schedule.ir.evaluate import loosen, memory_profile
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.rules.builders import min_memory, one_at_a_time
from rlhfuse.schedule.search.solution import sequence_of
from rlhfuse.simulator.threshold import load_threshold

ON_GPU = dict(trainer__hardware="a100", rollout__kv_blocks_per_instance=24, rollout__max_batched_tokens=64)
GIVEN = ("actor.path=x", "reward.function=r:f", "data.train_files=[p.jsonl]")
CELLS = [  # each filled 99.6 to 105% of a GPU, or its inboxes had no room
    ("llama-3.2-3b", 8, "grpo"),
    ("qwen2.5-7b", 4, "grpo"),
    ("qwen3-0.6b", 4, "ppo"),
    ("llama-3.2-1b", 1, "ppo"),
    ("qwen2.5-1.5b", 2, "grpo"),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_no_plan_of_a_real_model_is_above_its_headroom(cell):
    memory = plan_of(*cell).memory
    for phase in memory.phases:
        assert memory.needed_bytes(phase) <= loosen(0.9 * memory.limit), phase.phase
    assert not memory.warnings()


def test_what_stages_receive_has_room_beside_the_schedule():
    """The fullest schedule under the cap has a little more than its inboxes leave; a leaner one is taken."""
    draft = drafted(run(**ON_GPU), SPECS, 4)
    passing, problem = draft.memory.passing, draft.training.problem
    passing = replace(passing, received={name: 20 * held for name, held in passing.received.items()})
    static, least = max(map(max, zip(draft.memory.training_bytes))), max(min_memory(problem))
    made = [short_search(0, replace(problem, memory_cap=static + part * least)) for part in (3.0, 2.0, 1.5, 1.0)]
    peaks = [[max(memory_profile(one, node)) for node in range(problem.nodes)] for one in made]
    graph = build_graph(problem)
    sequences = [sequence_of(graph, one) for one in (*made, one_at_a_time(problem))]
    rooms = [held - 0.1 * (held - peak) for held, peak in zip(passing.held_by(graph, sequences[0]), peaks[0])]
    capped = replace(problem, memory_cap=tuple(room + problem.node_static(n) for n, room in enumerate(rooms)))

    def find(stated):
        fits = (all(peak <= stated.node_cap(n) for n, peak in enumerate(row)) for row in peaks)
        yield next((one for one, fit in zip(sequences, fits) if fit), sequences[-1])

    assert next(find(capped)) is sequences[0] and passing.over(build_graph(capped), sequences[0])
    found = with_room(passing, capped, find)
    assert not passing.over(build_graph(capped), found) and found.tolist() != sequences[-1].tolist()


def test_a_plan_above_95_percent_warns_and_below_does_not():
    whole = PlanReport.of(shared_plan(**ON_GPU)).memory
    needs = max(map(whole.needed_bytes, whole.phases))
    for share, count in ((0.99, True), (0.93, False)):
        memory = replace(whole, limit=needs / share)
        assert bool(memory.warnings()) == count and (share > NEARLY_FULL) == count
        assert any("warning" in line for line in memory.lines()) == count
    # layouts that are given may fill what the headroom leaves, and then say so
    tight = PlanReport.of(
        planned(run(**ON_GPU, fusion__intra_stage=False, trainer__memory_limit_gb=needs / 0.97e9))
    ).memory
    assert any("training" in line for line in tight.warnings())


def test_a_limit_above_the_memory_of_a_gpu_is_refused():
    for limit in (80.1, 200.0, 1e9):
        with pytest.raises(InputError, match=r"memory_limit_gb=.* one a100 has 80;"):
            drafted(run(**ON_GPU, trainer__memory_limit_gb=limit), SPECS, 4)
    drafted(run(**ON_GPU, trainer__memory_limit_gb=80.0), SPECS, 4)


@pytest.fixture
def open_run():
    """Overrides -> a run whose layouts are open."""

    def settled(world: int, specs=SPECS, **keys):
        layouts = ("actor_train", "critic_train", "generation", "inference", "sequence_parallel")
        scorers = ("reference_inference", "reward_inference", "critic_inference")
        opened = {f"parallel__{row}": "auto" for row in (*layouts, *scorers)}
        config = run(**{**opened, "fusion__actor_microbatches": "auto", "trainer__recompute": "auto", **keys})
        return settle_but_layouts(Job(config, specs, world))

    return settled


def test_a_table_with_too_many_microbatches_is_left_out_and_counted(open_run, monkeypatch):
    settled = open_run(4)
    whole = Ranking(Setting.of(settled)).fastest(1)
    monkeypatch.setattr("rlhfuse.schedule.ir.problem.MOST_TASKS", 60)
    some = Ranking(Setting.of(settled)).fastest(1)
    assert some.refused["too many micro-batches"] > 0 and "too many micro-batches" not in whole.refused
    monkeypatch.setattr("rlhfuse.schedule.ir.problem.MOST_TASKS", 1)
    with pytest.raises(InputError, match="too many micro-batches.*fusion.microbatch_tokens or algorithm.minibatches"):
        Ranking(Setting.of(settled)).fastest(1)


def test_large_batches_can_be_planned():
    keys = {"rollout__prompts_per_iteration": 6000, "rollout__samples_per_prompt": 4, "algorithm__minibatches": 1}
    assert drafted(run(**keys, fusion__actor_microbatches=24_000), SPECS, 4).training.problem.tasks > 20_000 * 8


@pytest.mark.parametrize("tensor, named", [("d4t1p1", True), ("d1t4p1", False)])
def test_a_remedy_that_is_at_its_end_is_not_named(tensor, named):
    keys = {**ON_GPU, "parallel__generation": tensor, "rollout__kv_blocks_per_instance": 40_000_000}
    keys |= {f"parallel__{role}_inference": tensor for role in ("reference", "reward", "critic")}
    with pytest.raises(InputError, match="generation needs") as caught:
        drafted(run(**keys, parallel__inference=tensor), SPECS, 4)
    text = str(caught.value)
    assert ("more tensor ranks for parallel.generation" in text) == named and "kv_blocks_per_instance" in text
    assert "memory_limit_gb" not in text, "a GPU has no more"


def test_a_number_of_ranks_below_one_is_refused():
    for ranks in (0, -4):
        with pytest.raises(InputError, match=f"--world-size {ranks} "):
            planned_world_size(run(), ranks)


def test_nothing_after_an_equals_sign_is_the_empty_text(tmp_path):
    assert load_config(None, [*GIVEN, "fusion.library=", "trainer.output_dir="]).fusion.library == ""
    with pytest.raises(InputError, match="trainer.iterations='' must be a whole number"):
        load_config(None, [*GIVEN, "trainer.iterations="])


def test_a_layout_that_is_given_is_kept():
    """Also where micro-batches alone are searched, and where models that score have different ones."""
    rows = ("inference", "reference_inference", "reward_inference", "critic_inference")
    for given in (dict.fromkeys(rows, "d2t2p1"), {"reward_inference": "d2t2p1", "generation": "d4t1p1"}):
        asked = run(fusion__actor_microbatches="auto", **{f"parallel__{row}": text for row, text in given.items()})
        made = settle(Job(asked, SPECS, 4)).config
        assert all(getattr(made.parallel, row) == getattr(asked.parallel, row) for row in ("generation", *rows))


# files -------------------------------------------------------------------------------------------------------------


def test_costs_of_another_model_or_machine_are_refused(tmp_path):
    config = resolve_device(run(fusion__profile=str(tmp_path / "costs.json")))
    made = made_for(config.trainer, given_tasks(config.parallel, config.roles(), 4), SPECS)
    for change, named in (
        ({}, ""),
        ({"actor": "2 layers"}, "actor=2 layers"),
        ({"hardware": "a100"}, "hardware=a100"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16"),
        ({"generation_tp": 2}, "generation_tp=2"),
        ({"reference": None}, "reference=None"),
        (None, "=None"),
    ):
        told = None if change is None else made | change
        write_json(tmp_path / "costs.json", linear_file().to_dict() | {"made_for": told})
        if not named:
            assert drafted(config, SPECS, 4).costs == linear_cost()
            continue
        with pytest.raises(InputError, match=f"costs.json was made for .*{named}"):
            drafted(config, SPECS, 4)


SWEEP = [{"ratio": 0.1, "threshold": 2, "destinations": 1, "fused_seconds": 1.0}]
SWEEP[0] |= {"generation_seconds": 0.5, "migration_seconds": 0.1}
GOOD = {"threshold": 2, "ratio": 0.1, "destinations": 1, "instances": 4, "serial_seconds": 2.0, "fused_seconds": 1.0}
GOOD |= {"sweep": SWEEP, "lengths": {"p50": 1, "p999": 2, "max": 3, "clipped": 0}}


@pytest.mark.parametrize(
    "change, named",
    [
        ({"destinations": 99}, "destinations is 99 of 4"),
        ({"destinations": 0}, "destinations is 0 of 4"),
        ({"destinations": 4}, "destinations is 4 of 4"),
        ({"instances": 0}, "instances"),
        ({"serial_seconds": -1.0}, "serial_seconds"),
        ({"fused_seconds": 0.0}, "fused_seconds"),
        ({"ratio": 1.5}, "ratio"),
        ({"sweep": [SWEEP[0] | {"destinations": 4}]}, "destinations is 4 of 4"),
        ({"sweep": [SWEEP[0] | {"fused_seconds": -1.0}]}, "fused_seconds"),
        ({"sweep": [SWEEP[0] | {"migration_seconds": -0.1}]}, "migration_seconds"),
        ({"samples": 1}, "above its 1 samples"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_thresholds_that_cannot_be_are_refused(tmp_path, change, named):
    write_json(tmp_path / "t.json", GOOD)
    assert load_threshold(tmp_path / "t.json").destinations == 1
    write_json(tmp_path / "t.json", GOOD | change)
    with pytest.raises(InputError, match=f"t.json.*{named}"):
        load_threshold(tmp_path / "t.json")


@pytest.mark.parametrize(
    "key, value",
    [("flops", 0.5), ("flops", 1e30), ("memory_bytes", 1e30), ("memory_bytes", 1.0), ("host_bandwidth", 1.0)]
    + [("launch_seconds", 100.0), ("devices_per_node", 0), ("moved_share", 2.0), ("process_bytes", 10**30)],
)
def test_machines_that_cannot_be_are_refused(tmp_path, key, value):
    save_hardware(tmp_path / "m.json", hardware_by_name("h100"))
    assert load_hardware(tmp_path / "m.json") == hardware_by_name("h100")
    raw = json.loads((tmp_path / "m.json").read_text())
    write_json(tmp_path / "m.json", raw | {key: value})
    with pytest.raises(InputError, match=f"m.json.*{key}"):
        load_hardware(tmp_path / "m.json")


def test_bytes_are_told_without_exponents():
    for count, told in ((1023, "1023 B"), (1000 << 10, "1000 KiB"), (1023.4 * 2**30, "1023 GiB"), (1536, "1.5 KiB")):
        assert readable_bytes(count) == told
