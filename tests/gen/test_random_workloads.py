"""Thousands of random workloads of two engines: not one bit differs from the sample alone.

A case draws sizes of both engines (blocks, sequences, tokens of a step), samples that share prefixes, and what
happens to them between the steps: arrivals, aborts, preemption, moves with keys and values or as tokens, pauses,
loading of weights; and what is guessed of their next tokens: by counts, or by a rule of scripted_drafts.py. A tenth of
the cases has 32 samples that end with more than four blocks each. Five shapes of model; bfloat16; two ranks.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from testkit.engine_pair import SPEC, Workload, draw_pair, draw_requests, move, serve
from testkit.gen_models import tiny_spec
from testkit.profiles import share

from rlhfuse.gen.engine import SamplingParams

POOL_RANKS = 2
ORDINARY, LONG = 1000, 20_000
WIDE = 32
REQUESTS = draw_requests(96, seed=11, longest_stem=24, most_tokens=10)
SMALL = dict(hidden=32, mlp=40, vocab=SPEC.vocab, context=SPEC.context, eos_token_ids=(7, 11))
ONE_HEAD = SMALL | dict(hidden=64, layers=1, heads=3, kv_heads=1, head_dim=20, qkv_bias=True, proj_bias=True)
MODELS = {
    "llama": (SPEC, torch.float32),
    "llama-bfloat16": (SPEC, torch.bfloat16),
    "qwen2": (tiny_spec(**SMALL, head_dim=8, qkv_bias=True, tied_embeddings=True), torch.float32),
    "qwen3": (tiny_spec(**SMALL, head_dim=16, heads=6, qk_norm=True), torch.float32),
    "biased-llama-one-kv-head": (tiny_spec(**ONE_HEAD), torch.float32),
}
EVENTS = (
    "aborted",
    "preempted by hand",
    "preempted for lack of blocks",
    "weights loaded",
    "paused",
    "moved with KV",
    "moved as tokens",
    "chunked",
    "prefix shared",
    "guesses right",
    "guesses wrong",
)


@pytest.fixture(params=MODELS)
def workload(request) -> Workload:
    return Workload(REQUESTS, *MODELS[request.param])


def run_cases(workload: Workload, first: int, count: int) -> Counter[str]:
    """Serve `count` random cases; everything that can happen happens often."""
    seen: Counter[str] = Counter()
    for case in range(first, first + count):
        rng, wide = random.Random(case), case % 10 == 0
        pair, samples = draw_pair(workload, rng, WIDE * wide)
        try:
            serve(pair, samples, rng)
        except AssertionError as error:
            error.add_note(f"case {case}: {[engine.options for engine in pair.engines]}")
            raise
        seen += pair.seen
        seen["wide cases"] += wide
        seen["samples compared"] += len(pair.finished)
    print(dict(seen))
    assert seen["wide cases"] * 10 >= count and seen["samples compared"] > 5 * count
    for event in EVENTS:
        assert seen[event] >= count // 10, f"{event} happened {seen[event]} times in {count} cases"
    return seen


def test_a_thousand_random_workloads_equal_alone(workload):
    count, number = share(ORDINARY // len(MODELS)), list(MODELS.values()).index((workload.spec, workload.dtype))
    run_cases(workload, number * count, count)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_random_workloads_equal_alone(workload):
    run_cases(workload, 1_000_000, LONG // len(MODELS))


def on_rank(rank: int, count: int) -> Counter[str]:
    return run_cases(Workload(REQUESTS, tp_group=dist.group.WORLD), 2_000_000, count)


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_random_workloads_on_two_ranks_equal_alone(workers, count):
    """Compared on each rank with what two ranks give for the sample alone."""
    first, second = workers.run(on_rank, count)
    assert first == second, "ranks disagree"


def pass_through(count: int, seed: int) -> None:
    """`count` short samples pass through one small engine, some aborted, moved or interrupted; no block is lost."""
    workload, rng = Workload([]), random.Random(seed)
    sizes = dict(num_blocks=60, block_tokens=4, max_sequences=64, max_batched_tokens=128)
    engine, other = workload.engine(**sizes), workload.engine(**sizes)
    params = [SamplingParams(max_tokens=n, seed=n) for n in (1, 2, 3, 5)]
    stems = [[rng.randrange(SPEC.vocab) for _ in range(8)] for _ in range(6)]
    entered = finished = aborted = steps = 0
    while entered < count or engine.has_unfinished():
        while entered < count and len(engine.unfinished()) < 80:
            prompt = rng.choice(stems)[: rng.randint(0, 8)] + [rng.randrange(SPEC.vocab)]
            engine.add(entered, prompt, rng.choice(params))
            entered += 1
        finished += len(engine.step())
        steps += 1
        here = [state.sample_id for state in engine.unfinished()]
        if here and steps % 3 == 0:
            engine.abort(rng.choice(here))
            aborted += 1
        elif steps % 50 == 1:
            move(engine, other, here, with_kv=steps % 100 == 1, as_bytes=False)
            engine, other = other, engine
        elif steps % 50 == 26:
            engine.pause()
            engine.resume()
        engine.check_integrity()
        other.check_integrity()
    assert finished + aborted == count
    assert engine.free_blocks == other.free_blocks == 60


def test_no_block_is_lost_after_five_thousand_samples():
    pass_through(share(5_000), seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_block_is_lost_after_a_hundred_thousand_samples():
    pass_through(100_000, seed=1)
