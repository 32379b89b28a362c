"""The batch of a run: mini-batches that it leaves open, by all batches and layouts of a small size; micro-batches."""

from itertools import product

import pytest
from testkit.four_ranks import TINY
from testkit.profiles import share

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic, resolve_batch
from rlhfuse.decisions.layout_rules import LayoutRules

SPECS = {"actor": TINY, "critic": TINY}
LONGEST = 8 + RunConfig().rollout.max_response_tokens
FIRST = f"the first with at most {3 * LONGEST:,} tokens each"
PIPELINES = (("d1t1p4", "d2t1p2"), ("d2t1p2", "d1t1p4"), ("d4t1p1", "d4t1p1"), ("d1t2p2", "d2t2p1"), ("d1t1p4", ""))


def run(samples: int, layouts: tuple[str, str], minibatches: int | str, microbatches: int | str) -> RunConfig:
    actor, critic = layouts
    return (
        RunConfig()
        .with_(
            rollout={"prompts_per_iteration": samples, "samples_per_prompt": 1},
            data={"max_prompt_tokens": 8},
            algorithm={"minibatches": minibatches, "name": "ppo" if critic else "reinforce++"},
            fusion={"actor_microbatches": microbatches},
            parallel={"actor_train": actor, "critic_train": critic or actor, "generation": "d4t1p1"},
        )
        .with_(parallel=dict.fromkeys(("inference", "critic_inference"), "d4t1p1"), reference={"path": "none"})
    )


def runs(config: RunConfig) -> bool:
    specs = {role: TINY for role in config.roles() if role in SPECS}
    config = config.with_(reward={"function": "m:f"})
    try:
        LayoutRules(config, specs, 4).table()
    except InputError:
        return False
    return True


@pytest.mark.parametrize("layouts", PIPELINES)
def test_minibatches_that_are_left_open_run_wherever_any_number_does(layouts):
    for samples, minibatches, microbatches in product(range(1, share(40)), (AUTO, 1, 2, 3), (AUTO, 1, 2, 3, 8)):
        cut = {"fusion": {"microbatch_tokens": 2 * LONGEST if microbatches == AUTO else AUTO}}
        found = resolve_batch(run(samples, layouts, minibatches, microbatches).with_(**cut))
        assert found.fusion.actor_microbatches == microbatches
        if minibatches != AUTO:
            assert found.algorithm.minibatches == minibatches
        elif runs(run(samples, layouts, 4, microbatches).with_(**cut)):
            assert found.algorithm.minibatches == 4 or samples // 4 < 4, samples
        if not runs(found):
            choices = range(1, 41) if minibatches == AUTO else (minibatches,)
            others = (run(samples, layouts, count, microbatches).with_(**cut) for count in choices)
            assert not any(map(runs, others)), (samples, minibatches, microbatches)


def test_beside_layouts_that_are_auto_minibatches_follow_from_samples_and_given_rows_alone():
    opened = run(64, ("auto", "auto"), AUTO, AUTO)
    found = resolve_batch(opened)
    assert (found.algorithm.minibatches, found.fusion.actor_microbatches) == (4, AUTO)
    for layouts in PIPELINES[:4]:
        assert resolve_batch(run(64, layouts, AUTO, AUTO)).algorithm.minibatches == 4, "as with layouts that are given"
    assert resolve_batch(run(6, ("auto", "auto"), AUTO, AUTO)).algorithm.minibatches == 1
    assert resolve_batch(run(64, ("auto", "d4t1p1"), 2, 8)) == run(64, ("auto", "d4t1p1"), 2, 8)
    assert resolve_batch(run(8, ("d4t1p1", "auto"), AUTO, AUTO)).algorithm.minibatches == 2


def test_the_batch_of_tokens_says_what_may_come():
    batch = batch_of(32, ("d2t1p2", "d1t1p4"), {"microbatch_tokens": 3 * LONGEST})
    assert batch.cut.rungs == (2, 3, 4, 5, 6)  # as many as fill the critic's four stages once, up to 32 / 2 / 3
    assert batch.microbatches_of(5) == {"actor": 5, "critic": 10}
    assert batch.most_microbatches == 12 and batch.by_tokens
    told = batch.lines()
    assert told[3] == "32 samples / (2 actor pipelines x 2 or 3 or 4 or 5 or 6 micro-batches), " + FIRST
    assert told[4] == "32 samples / (1 critic pipelines x 4 or 6 or 8 or 10 or 12 micro-batches), " + FIRST


def test_in_an_order_of_turns_microbatches_divide_over_the_stages():
    virtual = "d2t1p2v2", "d1t1p4v2"
    for rule, multiple in (("search", 1), ("serial", 2), ("interleaved", 2)):
        rungs = batch_of(32, virtual, {"microbatch_tokens": LONGEST, "intra_stage": rule}).cut.rungs
        assert all(rung % multiple == 0 and 2 * rung % (4 if multiple > 1 else 1) == 0 for rung in rungs), rule
        assert (3 in rungs) == (multiple == 1)


def batch_of(samples: int, layouts: tuple[str, str], fusion: dict) -> BatchArithmetic:
    made = run(samples, layouts, 1, AUTO).with_(fusion=fusion)
    rows = {"generation": "d4t1p1", "actor_train": layouts[0], "critic_train": layouts[1]}
    parsed = {row: ParallelLayout.parse(text) for row, text in rows.items()}
    return BatchArithmetic.of(made.rollout, made.algorithm, made.fusion, parsed, LONGEST)
