"""Thousands of random workloads of two engines: not one bit differs from the sample alone.

A case draws sizes of both engines (blocks, sequences, tokens of a step), samples that share prefixes, and what
happens to them between the steps: arrivals, aborts, preemption, moves with keys and values or as tokens, pauses,
loading of weights; and what is guessed of their next tokens: by counts, or by a rule of scripted_drafts.py. A tenth of
the cases has 32 samples that end with more than four blocks each. Four shapes of model; bfloat16; two ranks.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from testkit.engine_pair import SPEC, EnginePair, Workload, draw_requests
from testkit.gen_models import tiny_spec
from testkit.scripted_drafts import KINDS

from rlhfuse.base.errors import leave

ORDINARY, LONG = 1000, 20_000
WIDE = 32
REQUESTS = draw_requests(96, seed=11, longest_stem=24, most_tokens=10)
SMALL = dict(hidden=32, mlp=40, vocab=SPEC.vocab, context=SPEC.context, eos_token_ids=(7, 11))
MODELS = {
    "llama": (SPEC, torch.float32),
    "llama-bfloat16": (SPEC, torch.bfloat16),
    "qwen2": (tiny_spec(**SMALL, head_dim=8, qkv_bias=True, tied_embeddings=True), torch.float32),
    "qwen3": (tiny_spec(**SMALL, head_dim=16, heads=6, qk_norm=True), torch.float32),
    "llama-one-kv-head": (
        tiny_spec(**(SMALL | dict(hidden=64)), layers=1, heads=3, kv_heads=1, head_dim=64),
        torch.float32,
    ),
}


@pytest.fixture(params=MODELS)
def workload(request) -> Workload:
    return Workload(REQUESTS, *MODELS[request.param])


def draw_pair(workload: Workload, rng: random.Random, wide: bool) -> tuple[EnginePair, list[int]]:
    """Two engines of random size and the samples that they will serve."""
    block_tokens = rng.choice((1, 2, 3, 4)) if wide else rng.choice((1, 2, 3, 4, 5, 8, 16))
    fitting = [
        sample_id
        for sample_id, request in workload.requests.items()
        if not wide or len(request.prompt) + len(workload.alone(sample_id, block_tokens).tokens) - 1 > 4 * block_tokens
    ]
    samples = rng.sample(fitting, WIDE if wide else rng.randint(1, 9))
    fewest = workload.fewest_blocks(samples, block_tokens)
    options = [
        dict(
            block_tokens=block_tokens,
            num_blocks=fewest + int(rng.choice((0, 1, 6)) * rng.random() * fewest),
            max_sequences=rng.randint(8, 40) if wide else rng.randint(2, 12),
            max_batched_tokens=rng.choice((16, 48, 200)) if wide else rng.choice((2, 5, 7, 16, 40, 200)),
            draft_rows=rng.choice((0, 3, 16, 16, 40)),
        )
        for _ in range(2)
    ]
    pair = EnginePair(workload, options)
    pair.guess_by_rule((rng.choice(KINDS), rng.choice(KINDS)), rng)
    return pair, samples


def serve(pair: EnginePair, samples: list[int], rng: random.Random) -> None:
    """Samples arrive one after another while things happen; then both engines run to the end."""
    coming = list(samples)
    for _ in range(rng.randint(0, 8) + len(coming) // 8):
        for _ in range(rng.randint(0, max(1, len(coming) // 2))):
            if coming:
                pair.add(rng.randrange(2), coming.pop())
        which = rng.randrange(2)
        here = pair.unfinished(which)
        event = rng.randrange(12)
        if event == 0 and here:
            sample_id = rng.choice(here)
            pair.abort(which, sample_id)
            coming.insert(0, sample_id)  # and asks again later
        elif event == 1:
            pair.preempt(which)
        elif event == 2:
            pair.reload(which)
        elif event == 3 and not pair.paused[which]:
            pair.pause(which)
        elif event in (4, 5) and pair.paused[which]:
            pair.resume(which)
        elif event >= 6 and here:
            running = [s.sample_id for s in pair.engines[which].unfinished() if s.kv_tokens]
            movable = running if running and rng.random() < 0.8 else here
            pair.move(which, rng.sample(movable, rng.randint(1, len(movable))), rng.random() < 0.8, rng.random() < 0.5)
        for which in (0, 1):
            for _ in range(rng.randint(0, 4)):
                pair.step(which)
    for sample_id in coming:
        pair.add(rng.randrange(2), sample_id)
    pair.drain()
    assert pair.finished == set(samples) and not pair.aborted


def run_cases(workload: Workload, first: int, count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for case in range(first, first + count):
        rng, wide = random.Random(case), case % 10 == 0
        pair, samples = draw_pair(workload, rng, wide)
        try:
            serve(pair, samples, rng)
        except AssertionError as error:
            error.add_note(f"case {case}: {[engine.options for engine in pair.engines]}")
            raise
        seen += pair.seen
        seen["cases"] += 1
        seen["wide cases"] += wide
        seen["samples compared"] += len(pair.finished)
    return seen


def check_seen(seen: Counter[str], cases: int) -> None:
    """The cases were as many as said, and everything that can happen happened often."""
    print(dict(seen))
    assert seen["cases"] == cases and seen["wide cases"] * 10 >= cases
    assert seen["samples compared"] > 5 * cases
    for event in (
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
    ):
        assert seen[event] > cases // 10, f"{event} happened {seen[event]} times in {cases} cases"


def test_a_thousand_random_workloads_equal_alone(workload):
    count, number = ORDINARY // len(MODELS), list(MODELS.values()).index((workload.spec, workload.dtype))
    check_seen(run_cases(workload, number * count, count), count)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_random_workloads_equal_alone(workload):
    count = LONG // len(MODELS)
    check_seen(run_cases(workload, 1_000_000, count), count)


def run_rank(rank: int, folder: str, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    seen = run_cases(Workload(REQUESTS, tp_group=dist.group.WORLD), 2_000_000, count)
    torch.save(dict(seen), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    leave(0)


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_random_workloads_on_two_ranks_equal_alone(tmp_path, count):
    """Compared on each rank with what two ranks give for the sample alone."""
    mp.spawn(run_rank, (str(tmp_path), count), nprocs=2)
    first, second = (Counter(torch.load(tmp_path / f"{rank}.pt")) for rank in (0, 1))
    assert first == second, "ranks disagree"
    check_seen(first, count)
