"""Steps that are launched before the draws of the one before are read give the samples of steps that wait.

Lives of samples are drawn at random (arrivals, aborts, preemption, moves, pauses, loading of weights, stop texts); the
model computes in torch on the CPU in float32, where a batch may change the last bits of a log-probability.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_device_forward import WIDE, Repeater, torch_engine
from testkit import triton_interpreter  # noqa: F401
from testkit.engine_pair import EnginePair, Request, Workload, draw_requests
from testkit.gen_models import random_weights, tiny_spec
from testkit.scripted_drafts import KINDS

from rlhfuse.gen.engine import Engine, EngineOptions, GenerationResult, SamplingParams
from rlhfuse.gen.gpu import sampling
from rlhfuse.gen.gpu.decode_graphs import Staging
from rlhfuse.gen.gpu.draws import DrawKernels

CASES = 60


def letters(tokens: list[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


def with_stop_texts(requests: list[Request]) -> list[Request]:
    stops = ((), (), ("a",), ("bc", "q"), ("xy", "m", "d"))
    return [replace(r, params=replace(r.params, stop=stops[i % len(stops)])) for i, r in enumerate(requests)]


class AheadWorkload(Workload):
    """Requests alone are run by an engine that waits, in pairs by engines that run ahead."""

    def engine(self, **options: int) -> Engine:
        ahead = "max_sequences" in options  # those of a pair
        settings = EngineOptions(**options, kernels="torch", run_ahead=ahead)
        return Engine(self.spec, self.weights, settings, detokenize=letters)


class AheadPair(EnginePair):
    """Never asks an engine for what is unfinished after a step, which would read the step in flight."""

    def step(self, which: int) -> None:
        if self.paused[which]:
            return
        engine = self.engines[which]
        for result in engine.step():
            same_sample(result, self.workload.alone(result.sample_id, self.block_tokens))
            assert result.sample_id not in self.finished | self.aborted, f"sample {result.sample_id} ended twice"
            self.finished.add(result.sample_id)
            self.seen[result.finish_reason] += 1
        self.check(which)
        self.seen["steps"] += 1
        self.seen["guesses right"] += engine.last_step.accepted_tokens
        self.seen["guesses wrong"] += engine.last_step.drafted_tokens - engine.last_step.accepted_tokens
        if (flying := engine._in_flight) is not None:
            self.seen["in flight"] += 1
            self.seen["a row too many"] += sum(seq.finish_reason is not None for seq, _ in flying.drawing)
            self.seen["in flight and preempted"] += sum(seq in engine.scheduler.waiting for seq, _ in flying.drawing)


def same_sample(found: GenerationResult, wanted: GenerationResult) -> None:
    assert replace(found, logprobs=()) == replace(wanted, logprobs=())
    assert np.allclose(found.logprobs, wanted.logprobs, rtol=0, atol=1e-4)


def live(workload: Workload, rng: random.Random) -> Counter[str]:
    """Samples arrive while things happen to two engines; then both run to the end."""
    block_tokens, samples = rng.choice((1, 2, 4, 16)), rng.sample(list(workload.requests), rng.randint(2, 10))
    fewest = workload.fewest_blocks(samples, block_tokens)
    options = [
        dict(
            block_tokens=block_tokens,
            num_blocks=fewest * rng.choice((1, 2, 6)),
            max_sequences=rng.randint(2, 12),
            max_batched_tokens=rng.choice((5, 16, 200)),
            draft_rows=rng.choice((0, 0, 8, 16)),
        )
        for _ in range(2)
    ]
    pair, coming = AheadPair(workload, options), list(samples)
    pair.guess_by_rule((rng.choice(KINDS), rng.choice(KINDS)), rng)
    for _ in range(rng.randint(2, 8)):
        for _ in range(min(len(coming), rng.randint(1, 5))):
            pair.add(rng.randrange(2), coming.pop())
        which, event = rng.randrange(2), rng.randrange(9)
        if event == 0 and (here := pair.unfinished(which)):
            pair.abort(which, rng.choice(here))
        elif event == 1:
            pair.preempt(which)
        elif event == 2:
            pair.reload(which)
        elif event == 3 and not pair.paused[which]:
            pair.pause(which)
        elif event >= 4 and (here := pair.unfinished(which)):
            pair.move(which, rng.sample(here, rng.randint(1, len(here))), rng.random() < 0.8, rng.random() < 0.5)
        for which in (0, 1):
            if pair.paused[which] and rng.random() < 0.5:
                pair.resume(which)
            for _ in range(rng.randint(0, 6)):
                pair.step(which)
    for sample_id in coming:
        pair.add(rng.randrange(2), sample_id)
    pair.drain()
    assert pair.finished | pair.aborted == set(samples)
    return pair.seen


def test_random_lives_end_as_they_do_without_running_ahead():
    workload, seen = AheadWorkload(with_stop_texts(draw_requests(60, seed=3, longest_stem=20))), Counter()
    for case in range(CASES):
        seen += live(workload, random.Random(case))
    print(dict(seen))
    assert seen["in flight"] > seen["steps"] // 3
    for event in ("stop", "length", "aborted", "preempted by hand", "paused", "moved with KV", "moved as tokens"):
        assert seen[event] > CASES // 10, f"{event} happened {seen[event]} times"
    assert seen["guesses right"] > CASES and seen["guesses wrong"] > CASES
    assert seen["a row too many"] > CASES // 3 and seen["weights loaded"] > 2


def test_triton_draws_in_a_running_engine_are_the_cpus(prompts):
    spec = tiny_spec(**WIDE)
    params = [SamplingParams(max_tokens=4, top_k=k, min_tokens=2, stop_token_ids=(5, 6)) for k in (0, 3, 0)]
    engines = [torch_engine(spec, Repeater()) for _ in range(2)]
    engines[0].runner._forward._kernels = DrawKernels(sampling.feed, sampling.draw)
    assert engines[0].generate(prompts[:3], params) == engines[1].generate(prompts[:3], params)


def test_a_decode_step_is_one_copy_and_one_replay_and_reads_the_one_before(monkeypatch, prompts):
    repeater, log = Repeater(), []
    engine = torch_engine(tiny_spec(**WIDE), repeater)
    send, end = Staging.send, engine._end
    monkeypatch.setattr(Staging, "send", lambda *args: log.append("copy") or send(*args))
    engine._end = lambda step: log.append("read") or end(step)
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    engine.step()
    assert log == ["copy"] and repeater.replayed == 0 and engine.last_step.batch == 0, "the prompts, not read yet"
    engine.step()
    assert engine.last_step.prefill_tokens == sum(map(len, prompts)) and engine.last_step.seconds > 0
    for steps in range(2, 30):
        log.clear()
        engine.step()
        assert log == ["copy", "read"] and repeater.replayed == steps and repeater.recorded == 1
        assert (engine.last_step.batch, engine.last_step.prefill_tokens) == (8, 0)
        assert all(seq.tokens[-1] < 0 and len(seq.tokens) == steps + 1 for seq in engine.scheduler.running)


def test_a_failure_forgets_what_was_in_flight_and_draws_it_again(monkeypatch, prompts):
    spec, params = tiny_spec(**WIDE), SamplingParams(max_tokens=12, ignore_eos=True)
    engine, expected = torch_engine(spec), torch_engine(spec, run_ahead=False).generate(prompts, params)
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, params)
    results = [result for _ in range(5) for result in engine.step()]
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "launch", lambda *_: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            engine.step()
    assert engine._in_flight is None and all(token >= 0 for s in engine.scheduler.waiting for token in s.tokens)
    engine.check_integrity()
    while engine.has_unfinished():
        results += engine.step()
    for found, wanted in zip(sorted(results, key=lambda r: r.sample_id), expected):
        same_sample(found, wanted)


def test_whoever_ends_in_flight_is_returned_once(prompts):
    """By `settle`, or by the next step where something else read the step; an abort drops it."""
    spec, results = tiny_spec(**WIDE), []
    for ask in (lambda engine: results.extend(engine.settle()), lambda engine: engine.unfinished()):
        engine = torch_engine(spec)
        engine.add(0, prompts[1], SamplingParams(max_tokens=1))
        assert engine.step() == [] and engine.has_unfinished()
        ask(engine)
        while engine.has_unfinished():
            results += engine.step()
        assert engine.unfinished() == [] and engine.free_blocks == 200
    assert len(results) == 2
    engine = torch_engine(spec)
    engine.add(0, prompts[1], SamplingParams(max_tokens=1))
    engine.step()
    engine.abort(0)
    assert not engine.has_unfinished() and engine.free_blocks == 200


@pytest.mark.gpu
def test_no_synchronisation_in_replayed_steps(prompts):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    spec = tiny_spec(**WIDE)
    weights = {name: w.to("cuda", torch.bfloat16) for name, w in random_weights(spec).items()}
    engine = Engine(spec, weights, EngineOptions(num_blocks=200), device="cuda", dtype=torch.bfloat16)
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, SamplingParams(max_tokens=60, top_p=0.9, ignore_eos=True))
    for _ in range(5):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.last_step.batch == len(prompts)
