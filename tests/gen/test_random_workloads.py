"""Thousands of random workloads of two engines: not one bit differs from the sample alone.

A case draws sizes of both engines (blocks, sequences, tokens of a step), samples that share prefixes, and what
happens to them between the steps: arrivals, aborts, preemption, moves with keys and values or as tokens, pauses,
loading of weights; and what is guessed of their next tokens: by counts, or by a rule of scripted_guesses.py. A tenth of
the cases has 32 samples that end with more than four blocks each. Five shapes of model; bfloat16; two ranks.
"""

import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from testkit.engine_pair import SPEC, Workload, draw_pair, draw_requests, serve
from testkit.gen_models import tiny_spec
from testkit.profiles import share

POOL_RANKS = 2
ORDINARY, LONG = 1000, 20_000
WIDE = 32
REQUESTS = draw_requests(96, seed=11, longest_stem=24, most_tokens=10)
SMALL = dict(hidden=32, mlp=40, vocab=SPEC.vocab, context=SPEC.context, eos_token_ids=(7, 11))
BIASED = dict(qkv_bias=True, proj_bias=True)
ONE_HEAD = SMALL | BIASED | dict(hidden=64, layers=1, heads=3, kv_heads=1, head_dim=20)
MODELS = {
    "llama": (SPEC, torch.float32),
    "biased-qwen3-bfloat16": (tiny_spec(**SMALL, head_dim=8, qk_norm=True, **BIASED), torch.bfloat16),
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
    """Serve `count` random cases; whatever can happen happens often."""
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
