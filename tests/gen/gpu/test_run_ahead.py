"""Steps that are launched before the draws of the one before are read give the samples of steps that wait.

Lives of samples are drawn at random (arrivals, aborts, preemption, moves, pauses, loading of weights, stop texts); the
model computes in torch on the CPU in float32, where a batch may change the last bits of a log-probability.
"""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from testkit import triton_interpreter  # noqa: F401
from testkit.engine_pair import EnginePair, Request, Workload, draw_pair, draw_requests, serve
from testkit.gen_models import PROMPTS, add_all, engine_of, random_weights, run_out
from testkit.profiles import share
from testkit.recorded_decode import WIDE, Repeater, torch_engine

from rlhfuse.gen.engine import Engine, EngineOptions, GenerationResult, SamplingParams
from rlhfuse.gen.gpu import sampling
from rlhfuse.gen.gpu.decode_graphs import Staging
from rlhfuse.gen.gpu.draws import DrawKernels

CASES = 100


def letters(tokens: list[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


def with_stop_texts(requests: list[Request]) -> list[Request]:
    stops = ((), (), ("a",), ("bc", "q"), ("xy", "m", "d"))
    return [replace(r, params=replace(r.params, stop=stops[i % len(stops)])) for i, r in enumerate(requests)]


class AheadWorkload(Workload):
    """Requests alone are run by an engine that waits, in pairs by engines that run ahead."""

    def engine(self, **options: int) -> Engine:
        ahead = "max_sequences" in options  # those of a pair
        choice = dict(kernels="torch", run_ahead=ahead, entropies=True, draft_rows=0)
        return engine_of(self.spec, self.weights, detokenize=letters, **(options | choice))


class AheadPair(EnginePair):
    """Never asks an engine for what is unfinished after a step, which would read the step in flight."""

    def running(self, engine: Engine) -> set[int]:
        return set()

    def compare(self, result: GenerationResult, alone: GenerationResult) -> None:
        same_sample(result, alone)

    def note(self, engine: Engine, ran_before: set[int]) -> None:
        if (flying := engine.loop.in_flight) is not None:
            self.seen["in flight"] += 1
            self.seen["a row too many"] += sum(seq.finish_reason is not None for seq, *_ in flying.drawing)
            self.seen["in flight and preempted"] += sum(seq in engine.scheduler.waiting for seq, *_ in flying.drawing)


def same_sample(found: GenerationResult, wanted: GenerationResult) -> None:
    assert replace(found, logprobs=(), entropies=()) == replace(wanted, logprobs=(), entropies=())
    for numbers, others in ((found.logprobs, wanted.logprobs), (found.entropies, wanted.entropies)):
        assert len(numbers) == len(others) and np.allclose(numbers, others, rtol=0, atol=1e-4)


def test_random_lives_end_as_they_do_without_running_ahead():
    workload, seen = AheadWorkload(with_stop_texts(draw_requests(60, seed=3, longest_stem=20))), Counter()
    cases = share(CASES)
    for case in range(cases):
        rng = random.Random(case)
        pair, samples = draw_pair(workload, rng, 12 * (case % 4 > 0), AheadPair)
        serve(pair, samples, rng)
        seen += pair.seen
    print(dict(seen))
    assert seen["in flight"] > seen["steps"] // 3
    for event in ("stop", "length", "aborted", "preempted by hand", "paused", "moved with KV", "moved as tokens"):
        assert seen[event] >= cases // 10, f"{event} happened {seen[event]} times"
    assert seen["a row too many"] > cases // 4 and seen["weights loaded"] > 2


def test_triton_draws_in_a_running_engine_are_the_cpus():
    params = [SamplingParams(max_tokens=4, top_k=k, min_tokens=2, stop_token_ids=(5, 6)) for k in (0, 3, 0)]
    engines = [torch_engine(Repeater()) for _ in range(2)]
    engines[0].forward._kernels = DrawKernels(sampling.feed, sampling.draw)
    assert engines[0].generate(PROMPTS[:3], params) == engines[1].generate(PROMPTS[:3], params)


def test_a_decode_step_is_one_copy_and_one_replay_and_reads_the_one_before(monkeypatch):
    repeater, log = Repeater(), []
    engine = torch_engine(repeater)
    send, end = Staging.send, engine.loop._end
    monkeypatch.setattr(Staging, "send", lambda *args: log.append("copy") or send(*args))
    engine.loop._end = lambda step: log.append("read") or end(step)
    add_all(engine, PROMPTS, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    engine.step()
    assert log == ["copy"] and repeater.replayed == 0 and engine.last_step.batch == 0, "the prompts, not read yet"
    engine.step()
    assert engine.last_step.prefill_tokens == sum(map(len, PROMPTS))
    for steps in range(2, 30):
        log.clear()
        engine.step()
        assert log == ["copy", "read"] and repeater.replayed == steps and repeater.recorded == 1
        assert (engine.last_step.batch, engine.last_step.prefill_tokens) == (8, 0)
        assert all(seq.tokens[-1] < 0 and len(seq.tokens) == steps + 1 for seq in engine.scheduler.running)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_failure_forgets_what_was_in_flight_and_draws_it_again(monkeypatch, kernels):
    """An engine that waits has nothing in flight."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engine = torch_engine(kernels=kernels)
    expected = torch_engine(run_ahead=False).generate(PROMPTS, params)
    results = add_all(engine, PROMPTS, params, steps=5)
    with monkeypatch.context() as patch:
        patch.setattr(engine.forward, "launch", lambda *_: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            engine.step()
    assert engine.loop.in_flight is None and all(token >= 0 for s in engine.scheduler.waiting for token in s.tokens)
    for found, wanted in zip(run_out(engine, results=results), expected, strict=True):
        same_sample(found, wanted)


def test_whoever_ends_in_flight_is_returned_once():
    """By `settle`, or by the next step where something else read the step; an abort drops it."""
    results = []
    for ask in (lambda engine: results.extend(engine.settle()), lambda engine: engine.unfinished()):
        engine = torch_engine()
        engine.add(0, PROMPTS[1], SamplingParams(max_tokens=1))
        assert engine.step() == [] and engine.has_unfinished()
        ask(engine)
        while engine.has_unfinished():
            results += engine.step()
        assert engine.unfinished() == [] and engine.free_blocks == 200
    assert len(results) == 2
    engine = torch_engine()
    engine.add(0, PROMPTS[1], SamplingParams(max_tokens=1))
    engine.step()
    engine.abort(0)
    assert not engine.has_unfinished() and engine.free_blocks == 200


@pytest.mark.gpu
def test_no_synchronisation_in_replayed_steps():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    weights = {name: w.to("cuda", torch.bfloat16) for name, w in random_weights(WIDE).items()}
    engine = Engine(WIDE, weights, EngineOptions(num_blocks=200), device="cuda", dtype=torch.bfloat16)
    add_all(engine, PROMPTS, SamplingParams(max_tokens=60, top_p=0.9, ignore_eos=True), steps=5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.last_step.batch == len(PROMPTS)
