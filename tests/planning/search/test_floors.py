"""Floors of a search lie below what they are floors of: schedules, memory of drafts, simulated generation, prices."""

import random

import pytest
from run_report.timeline import simulate_gen_infer
from testkit.four_ranks import with_cores
from testkit.profiles import share
from testkit.schedule_cases import random_instance, random_problem
from testkit.search_cases import (
    ROWS,
    TRAINED,
    SearchCase,
    auto_config,
    drawn_table,
    long_tail,
    priced_tables,
    random_case,
    space_of_setting,
    spec_of,
    with_memory,
    with_profiles,
)
from testkit.sim_helpers import with_turns

from rlhfuse.base.errors import InputError
from rlhfuse.costs.fits import Line
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.costs.speculation import Speculation
from rlhfuse.costs.table import CostTable
from rlhfuse.planning.graph_capture import graph_capture
from rlhfuse.planning.price import ideal_limits
from rlhfuse.planning.search.floors import TrainingFloors, generation_floor, work_bound
from rlhfuse.planning.search.search import WORTH_REACHING, Ranking
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.bounds.windows import Windows
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.rules.builders import greedy, min_memory, serial_1f1b
from rlhfuse.schedule.search.search import SearchSettings, search

ABOVE = 1 + 1e-9  # rounding


def check_bounds(problem: FusionProblem, annealed: bool = False) -> None:
    floor, least = work_bound(problem), Windows.of(problem).least_makespan
    assert 0 < floor <= least * ABOVE
    bound = latency_bound(problem)
    assert least <= bound * ABOVE
    schedules = [greedy(problem), serial_1f1b(problem)]
    if annealed:
        schedules.append(search(problem, SearchSettings(iterations=300, seed=1))[0])
    assert bound <= min(evaluate(schedule).makespan for schedule in schedules) * ABOVE


def test_the_work_of_a_node_bounds_every_schedule():
    """Any placement, nodes that are visited twice, split backwards, transfers."""
    for seed in range(share(300)):
        check_bounds(random_problem(seed), annealed=seed % 10 == 0)
        if seed % 5 == 0:
            check_bounds(random_instance(seed)[1])


def check_floors(case: SearchCase) -> None:
    """Every step of every table that fits is below its price, and none of them is refused before it is drafted."""
    setting = case.setting
    ranking = Ranking(setting)
    space, floors = ranking.space, TrainingFloors(setting)
    numbers = {space.table(t, g): (t, g) for t in range(len(space.training)) for g in range(len(space.generation))}
    for one in priced_tables(case):
        t, g = numbers[one.table]
        row, made, draft = space.training[t], one.price, one.draft
        training = made.schedules + made.steps
        rough, work = floors.rough_seconds(row), floors.seconds(row, floors.problems(row), work_bound)
        assert 0 < rough <= work * ABOVE and work <= training * ABOVE
        least = min_memory(draft.training.problem)
        process = draft.inputs.hardware.process_bytes
        held = max(draft.memory.needed(rank.phases(least)[-1]) for rank in draft.memory.ranks) - process
        always = min(draft.memory.needed(phase) for phase in draft.memory.static if phase.phase != "start") - process
        trained = [rank.static[-1] for rank in draft.memory.ranks]
        states = max(one.weights + one.optimizer + one.gradients for one in trained)
        assert floors.rough_bytes(row)[0] <= min(states, held) and floors.rough_bytes(row)[1] <= always
        below = ranking._generation_floor(g)
        assert below is not None and 0 < below <= made.generation.fused * ABOVE
        mine = [(part, draft.training.problems[rung].pipelines) for rung, part in draft.training.shares.items()]
        assert mine in [[(part, problem.pipelines) for part, problem in made] for made in floors.choices(row)]
        steps = [rough + below, ranking._by_work(t, g), ranking._by_moves(t, g), ranking._by_split(t, g)]
        steps += [ranking._by_order(t, g), ranking._by_draft(t, g), ranking._by_room(t, g), ranking._by_bound(t, g)]
        steps.append(made.seconds)
        assert None not in steps and ranking._by_reach(t, g) == made.seconds * (1 - WORTH_REACHING)
        assert all(step <= following * ABOVE for step, following in zip(steps, steps[1:]))
        assert ranking._held[t] <= held


@pytest.mark.parametrize("seed", range(share(24)))
def test_floors_are_below_prices(seed, monkeypatch):
    with_cores(monkeypatch, (2.0, 64.0)[seed % 2])
    check_floors(random_case(seed, most_tables=40))


@pytest.mark.parametrize("seed", range(share(8)))
def test_floors_are_below_measured_prices(seed, tmp_path):
    check_floors(with_profiles(random_case(seed, most_tables=40), tmp_path / "profile.json", seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_floors_are_below_prices_of_larger_spaces(seed):
    check_floors(random_case(seed, (4, 8, 16), most_tables=300))


@pytest.mark.parametrize("gigabytes, kept", [(2.75, False), (3.05, True), (3.2, False), (3.5, True)])
def test_a_cache_that_memory_cuts_down_may_be_kept(gigabytes, kept):
    """It has whole parts, which may leave so much free that no iteration records its graphs again."""
    keys: dict[str, object] = {f"parallel__{row}": "d2t2p1" for row in ROWS}
    keys |= {f"parallel__{row}": "d1t2p2" for row in TRAINED}
    keys |= {"trainer__hardware": "h100", "trainer__offload_optimizer": "false", "trainer__share_gpu": True}
    keys |= {"rollout__prompts_per_iteration": 2048, "rollout__max_response_tokens": 1900, "trainer__recompute": "full"}
    keys |= {"algorithm__minibatches": 512, "fusion__actor_microbatches": 4, "parallel__sequence_parallel": True}
    specs = dict.fromkeys(("actor", "critic", "reference", "reward"), spec_of(8, 256, 2, 2))
    setting = with_memory(SearchCase(auto_config(**keys), specs, 4, None), gigabytes).setting
    ranking = Ranking(setting)
    draft, needs = setting.draft(ranking.space.table(0, 0)), ranking._generation_bytes[0]
    held, capture = ranking._floors.rough_bytes(ranking.space.training[0])[0], graph_capture(draft, kept=False)
    assert draft.memory.keeps_generation(min_memory(draft.training.problem)) == kept
    assert draft.generation.limits.kv_capacity_bytes < ideal_limits(draft).kv_capacity_bytes and needs and capture
    assert ranking._may_keep(held, needs) or not kept
    before = ranking._by_work(0, 0)
    ranking._captures[0] = capture.seconds
    after = ranking._by_work(0, 0)
    assert after == before or not kept


def line(rng: random.Random, slopes: int) -> Line:
    return Line(rng.random() * 1e-3, tuple(rng.random() * 1e-5 for _ in range(slopes)))


def measured_cost(rng: random.Random) -> CostTable:
    guesses = tuple(sorted((rng.uniform(0, 8) for _ in range(6)), reverse=True))
    tokens = tuple(sorted((rng.uniform(1, 3) for _ in range(6)), reverse=True))
    speculation = Speculation(rng.random() * 1e-4, guesses, tokens) if rng.random() < 0.5 else None
    lines = line(rng, 2), line(rng, 2), line(rng, 2), line(rng, 1)
    return MeasuredCost(*lines, rng.random() * 1e-3, 1e-4, 1e-4, speculation=speculation).table


@pytest.mark.parametrize("kind", ["analytic", "measured", "profiled"])
@pytest.mark.parametrize("seed", range(share(12)))
def test_generation_is_never_simulated_below_its_floor(seed, kind, tmp_path):
    """Any R_t, room for few or many sequences and tokens, with pauses and without."""
    rng = random.Random(seed)
    case = random_case(seed)
    if kind == "profiled":
        case = with_profiles(case, tmp_path / "profile.json", seed)
    setting = case.setting
    for _ in range(4):
        table = drawn_table(space_of_setting(setting), rng)
        degrees = {table.generation.tp, *(layout.tp for _, layout in table.inference)}
        if kind == "profiled" and not degrees <= set(setting.inputs.measured.degrees):  # whatever trains
            with pytest.raises(InputError, match="has tensor degrees"):
                setting.generation_costs(table)
            continue
        costs, instances = setting.generation_costs(table), table.generation.dp
        limits, replicas = setting.limits(table, costs), max(degrees) // min(degrees)
        if kind == "measured":
            costs = measured_cost(rng)
        plain = long_tail(rng, rng.randint(1, 24) + instances)
        for batch in (plain, with_turns(plain, seed, seconds=1e-3)):
            floor = generation_floor((batch,), costs, limits, instances, replicas)
            for threshold in {0, 1, len(batch) // 2, len(batch)}:
                seconds = simulate_gen_infer(batch, instances, costs, limits, threshold).total_seconds
                assert 0 < floor <= seconds * ABOVE


def test_a_profile_of_one_degree_prices_generation_whatever_trains(tmp_path):
    """The first training row may have a degree that was not measured."""
    for seed in range(40):
        case = random_case(seed)
        setting = with_profiles(case, tmp_path / f"{seed}.json", seed).setting
        space = space_of_setting(setting)
        degrees = setting.inputs.measured.degrees
        for table in (space.table(0, number) for number in range(len(space.generation))):
            forwards = {table.generation.tp, *(layout.tp for _, layout in table.inference)}
            if table.actor_train.tp not in degrees and forwards <= set(degrees):
                assert setting.generation_costs(table).decode_step_seconds(1, 10) > 0
                return
    raise AssertionError("no run has such a row")
