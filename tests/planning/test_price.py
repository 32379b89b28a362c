"""The price of a draft: its parts add up, a plan of the same draft says the same, and less memory is never faster."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from testkit.search_cases import SearchCase, auto_config, long_tail, random_case, spec_of, with_memory

from rlhfuse.base.errors import InputError
from rlhfuse.planning.draft import PlanDraft
from rlhfuse.planning.efficiency import optimizer_step_seconds
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.price import (
    ideal_limits,
    minibatch_seconds,
    price,
    price_generation,
    schedule_seconds,
    simulate_generation,
    weight_moves,
)
from rlhfuse.planning.search.search import Row, search_tables
from rlhfuse.planning.search.table import Table
from rlhfuse.schedule.ir.evaluate import evaluate

SPECS = dict.fromkeys(("actor", "critic", "reference", "reward"), spec_of(4, 1024, 8, 4))
TABLE = Table.parse(
    (
        "parallel.generation=d2t2p1",
        "parallel.inference=d4t1p1",
        "parallel.actor_train=d1t2p2",
        "parallel.critic_train=d2t2p1",
        "parallel.sequence_parallel=false",
        "fusion.actor_microbatches=2",
        "trainer.recompute=full",
    )
)


def winner(seed: int) -> tuple[Row, PlanDraft] | None:
    """Of a random run in which something fits, with a short search for its schedule."""
    case = random_case(seed)
    case = replace(case, config=case.config.with_(fusion={"search_seconds": 0.1}))
    try:
        best = search_tables(case.config, case.specs, case.world_size, case.lengths).best
    except InputError:
        return None
    return best, case.setting.draft(best.table)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_says_what_the_search_priced(seed):
    if (found := winner(seed)) is None:
        return
    row, draft = found
    made, report = row.price, make_plan(draft).report
    said, count = report.seconds, draft.batch.optimizer_steps
    assert (said.gen_infer_serial, said.gen_infer_fused) == (made.generation.serial, made.generation.fused)
    assert report.threshold_samples == made.generation.threshold_samples
    assert sum(move.seconds for move in report.weight_moves) == made.moves <= said.weight_moves
    steps = count * optimizer_step_seconds(draft.analytic)
    assert made.steps == steps
    annealed = count * minibatch_seconds(draft, report.schedule.makespan_seconds)
    assert said.training_fused == pytest.approx(annealed + steps)
    assert made.schedules <= annealed * (1 + 1e-9)
    assert made.schedules >= count * report.schedule.lower_bound_seconds * (1 - 1e-9)
    if not report.offload:
        assert said.weight_moves == made.moves
    if draft.given:
        assert made.schedules == pytest.approx(annealed)
    least = made.seconds - made.capture + said.capture
    assert said.fused >= least * (1 - 1e-9) or report.offload
    assert report.memory_limit == row.limit_bytes


def test_parts_add_up():
    tried = 0
    for seed in range(12):
        if (found := winner(seed)) is None:
            continue
        row, draft = found
        again = price(draft, price_generation(draft), sum(move.seconds for move in weight_moves(draft)))
        assert again == row.price
        assert again.seconds == pytest.approx(sum(again.parts.values())) and min(again.parts.values()) >= 0
        rest = again.schedules + again.steps + again.offload
        assert again.beside_training + rest == pytest.approx(again.seconds)
        assert len(set(again.parts)) == 6
        tried += 1
    assert tried > 6


def test_an_order_by_rule_is_priced_as_it_is():
    for rule in ("serial", "search"):
        config = auto_config(fusion__intra_stage=rule, trainer__hardware="h100")
        draft = SearchCase(config, SPECS, 4, None).setting.draft(TABLE)
        if rule == "serial":
            assert draft.given and schedule_seconds(draft) == pytest.approx(
                float(evaluate(draft.given[0]).makespan) * 1e-6
            )
            serial = schedule_seconds(draft)
    assert schedule_seconds(draft) < serial


@pytest.mark.parametrize("inter_stage", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_less_memory_is_never_priced_as_faster(seed, inter_stage):
    specs, lengths = dict.fromkeys(SPECS, spec_of(8, 256, 2, 2)), long_tail(random.Random(seed), 60)
    keys = {"rollout__prompts_per_iteration": 192, "fusion__inter_stage": inter_stage, "trainer__hardware": "h100"}
    keys |= {"rollout__max_response_tokens": 1900}
    keys |= {"algorithm__minibatches": 32, "trainer__offload_optimizer": "false"}
    case = SearchCase(auto_config(**keys), specs, 4, lengths)
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
        cut.add(draft.limits.kv_capacity_bytes)
        made = price_generation(draft)
        seconds.append(made.fused)
        assert made.fused >= ideal.fused and made.serial >= ideal.serial
    assert len(seconds) > 1 and len(cut) > 1, "the cache is cut down"


def test_a_luckier_order_in_less_room_is_not_priced_as_faster():
    specs, lengths = dict.fromkeys(SPECS, spec_of(8, 256, 2, 2)), long_tail(random.Random(22), 60)
    keys = {"rollout__prompts_per_iteration": 192, "rollout__max_response_tokens": 1900, "trainer__hardware": "h100"}
    keys |= {"algorithm__minibatches": 32}
    draft = with_memory(SearchCase(auto_config(**keys), specs, 4, lengths), 70.0).setting.draft(TABLE)
    ideal = ideal_limits(draft)
    small = replace(ideal, kv_capacity_bytes=ideal.kv_capacity_bytes // 32)
    lucky, whole = simulate_generation(draft, small), simulate_generation(draft, ideal)
    assert lucky.fused < whole.fused and lucky.serial == whole.serial
    made = price_generation(replace(draft, limits=small))
    assert (made.fused, made.serial) == (whole.fused, whole.serial)
