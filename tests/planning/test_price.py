"""The price of a draft: its parts add up, a plan of the same draft says the same, and less memory is never faster."""

import random
from dataclasses import replace

import pytest
from testkit.profiles import share
from testkit.search_cases import SearchCase, auto_config, long_tail, random_case, spec_of, table_of, with_memory

from rlhfuse.base.errors import InputError
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.planning import candidate as drafts
from rlhfuse.planning.candidate import Candidate
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.price import (
    Moves,
    ideal_limits,
    minibatch_seconds,
    price,
    price_generation,
    reached,
    simulate_generation,
    weight_moves,
)
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.rooflines import optimizer_step_seconds
from rlhfuse.planning.search.search import TOP, Ranking, Row
from rlhfuse.schedule.ir.evaluate import evaluate

SPECS = dict.fromkeys(("actor", "critic", "reference", "reward"), spec_of(4, 1024, 8, 4))
ROWS = ("generation=d2t2p1", "inference=d4t1p1", "actor_train=d1t2p2", "critic_train=d2t2p1", "sequence_parallel=false")
REST = ("fusion.actor_microbatches=2", "trainer.recompute=full")
TABLE = table_of((*(f"parallel.{row}" for row in ROWS), *REST))
LONG = {
    "rollout__prompts_per_iteration": 192,
    "rollout__max_response_tokens": 1900,
    "trainer__hardware": "h200",
    "algorithm__minibatches": 32,
}


def long_run(seed: int, **keys) -> SearchCase:
    """Samples in numbers and lengths that fill a cache."""
    specs = dict.fromkeys(SPECS, spec_of(8, 256, 2, 2))
    return SearchCase(auto_config(**LONG, **keys), specs, 4, long_tail(random.Random(seed), 60))


def winner(seed: int) -> tuple[Row, Candidate] | None:
    """The best table of a random run, if any fits, with a short search for its schedule."""
    case = random_case(seed)
    case = replace(case, config=case.config.with_(fusion={"search_seconds": 0.1}))
    try:
        best = Ranking(case.setting).fastest(TOP).best
    except InputError:
        return None
    return best, case.setting.draft(best.table)


@pytest.mark.parametrize("seed", range(share(20)))
def test_a_plan_says_what_the_search_priced_and_its_parts_add_up(seed):
    if (found := winner(seed)) is None:
        return  # some have too little memory
    row, draft = found
    made, report = row.price, PlanReport.of(make_plan(draft))
    said, count = report.seconds, draft.batch.optimizer_steps
    assert (said.gen_infer_serial, said.gen_infer_fused) == (made.generation.serial, made.generation.fused)
    assert report.threshold.samples == made.generation.threshold_samples
    moved = made.moves.seen(made.generation)
    assert Moves.of(report.weight_moves) == made.moves and made.moves.before <= moved <= said.weight_moves
    steps = count * optimizer_step_seconds(draft.analytic)
    assert made.steps == steps
    annealed = count * minibatch_seconds(draft, report.schedule.seconds_of)
    assert said.training_fused == pytest.approx(annealed + steps)
    assert min(made.schedules, annealed) >= count * report.schedule.lower_bound_seconds * (1 - 1e-9)
    if not report.memory.offload:
        assert said.weight_moves == moved
    if draft.training.given:
        assert made.schedules == pytest.approx(annealed)
    least = row.bound - made.capture + said.capture
    assert said.fused >= least * (1 - 1e-9) or report.memory.offload
    assert report.memory.limit == row.limit_bytes
    again = price(draft, price_generation(draft), Moves.of(weight_moves(draft)))
    assert again == made and len(set(made.parts)) == 6
    assert made.seconds == pytest.approx(sum(made.parts.values())) and min(made.parts.values()) >= 0
    assert made.beside_training + made.schedules + made.steps + made.offload == pytest.approx(made.seconds)


@pytest.mark.parametrize("inter_stage", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_less_memory_is_never_priced_as_faster(seed, inter_stage):
    case = long_run(seed, fusion__inter_stage=inter_stage, trainer__offload_optimizer="false")
    whole = with_memory(case, 70.0).setting.draft(TABLE)
    generation = next(phase for phase in whole.memory.static if phase.phase == "generation")
    full = whole.memory.needed(generation) - sum(whole.memory.early)
    ideal = price_generation(whole)
    cut, seconds = set(), []
    for part in (0.9, 0.7, 0.5, 0.3):
        try:
            draft = with_memory(case, (full - (1 - part) * generation.kv) / 1e9).setting.draft(TABLE)
        except InputError:  # training needs more than generation
            continue
        cut.add(draft.generation.limits.kv_capacity_bytes)
        made = price_generation(draft)
        seconds.append(made.fused)
        assert made.fused >= ideal.fused and made.serial >= ideal.serial
    assert len(seconds) > 1 and len(cut) > 1, "the cache is cut down"


def test_a_luckier_order_in_less_room_is_not_priced_as_faster():
    draft = with_memory(long_run(22), 70.0).setting.draft(TABLE)
    ideal = ideal_limits(draft)
    small = replace(ideal, kv_capacity_bytes=ideal.kv_capacity_bytes // 32)
    lucky, whole = simulate_generation(draft, small), simulate_generation(draft, ideal)
    assert lucky.fused < whole.fused and lucky.serial == whole.serial
    made = price_generation(replace(draft, generation=replace(draft.generation, limits=small)))
    assert (made.fused, made.serial) == (whole.fused, whole.serial)


def test_a_rank_trains_no_faster_than_its_host_launches():
    """Each node has two of the actor's four layers, and all of one of the critic's pipelines."""
    draft = SearchCase(auto_config(trainer__hardware="h100"), SPECS, 4, None).setting.draft(TABLE)
    layer = 2 * 0.001981798 + 0.001948997  # a forward runs again
    counts = {p.model: p.microbatches for p in draft.training.problem.pipelines}
    hosts = layer * (2 * counts["actor"] + 4 * counts["critic"])
    assert minibatch_seconds(draft, lambda rung: 0.0) == pytest.approx(hosts)
    assert minibatch_seconds(draft, lambda rung: 1e3) == pytest.approx(1e3)


def test_an_order_by_rule_is_priced_as_it_is(monkeypatch):
    """Where no host is slower than the device."""
    fast = replace(hardware_by_name("h100"), launch_seconds=0.0, backward_launch_seconds=0.0)
    monkeypatch.setattr(drafts, "hardware_by_name", lambda *name: fast)
    serial, searched = (
        SearchCase(auto_config(fusion__intra_stage=rule, trainer__hardware="h100"), SPECS, 4, None).setting.draft(TABLE)
        for rule in ("serial", "search")
    )
    by_rule = reached(serial)[0]
    assert serial.training.given
    assert by_rule == pytest.approx(float(evaluate(serial.training.given[0][2]).makespan) * 1e-6)
    assert reached(searched)[0] < by_rule
