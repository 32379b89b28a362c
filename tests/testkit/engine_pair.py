"""Two engines to which things happen between steps, and the runs of each sample alone to compare them with.

    Workload   one small model, a pool of requests, and the result of each request run by itself
    EnginePair    two engines of that workload: add, abort, preempt, move, pause, resume; every step is followed by
            check_integrity, and every finished sample must be, bit for bit, what it is alone

`EnginePair.seen` counts what really happened, so that a test can show that its cases were not empty.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.engine import Engine, EngineOptions, GenerationResult, SamplingParams
from testkit.gen_models import random_weights, tiny_spec
from testkit.moves import import_sequences, through_bytes
from testkit.scripted_drafts import ScriptedDrafter

SPEC = tiny_spec(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=40, vocab=61, context=96, eos_token_ids=())


@dataclass(frozen=True)
class Request:
    sample_id: int
    prompt: tuple[int, ...]
    params: SamplingParams


def draw_requests(count: int, seed: int, longest_stem: int = 40, most_tokens: int = 12) -> list[Request]:
    """Requests whose prompts begin alike: a few stems, cut anywhere, each with a tail or without, some twice."""
    rng = random.Random(seed)
    stems = [[rng.randrange(SPEC.vocab) for _ in range(longest_stem)] for _ in range(5)]
    requests: list[Request] = []
    for sample_id in range(count):
        stem = rng.choice(stems)[: rng.randint(0, longest_stem)]
        prompt = tuple(stem + [rng.randrange(SPEC.vocab) for _ in range(rng.randint(0 if stem else 1, 8))])
        if requests and rng.random() < 0.3:
            prompt = rng.choice(requests).prompt  # another sample of the same prompt
        most = rng.randint(1, most_tokens)
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.0, 1.0)),
            top_k=rng.choice((0, 0, 5, 1)),
            top_p=rng.choice((1.0, 1.0, 0.8)),
            max_tokens=most,
            min_tokens=rng.choice((0, min(2, most))),
            stop_token_ids=rng.choice(((), (1, 2, 3))),
            seed=rng.randrange(3),
        )
        requests.append(Request(sample_id, prompt, params))
    return requests


class Workload:
    """A model, its requests, and what each of them gives alone."""

    def __init__(
        self,
        requests: list[Request],
        spec: ModelSpec = SPEC,
        dtype: torch.dtype = torch.float32,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.spec, self.dtype, self.tp_group = spec, dtype, tp_group
        share = (dist.get_rank(tp_group), dist.get_world_size(tp_group)) if tp_group else (0, 1)
        self.weights = {name: weight.to(dtype) for name, weight in random_weights(spec, 0, *share).items()}
        self.requests = {request.sample_id: request for request in requests}
        self._single_engines: dict[int, Engine] = {}
        self._alone: dict[tuple[int, int], GenerationResult] = {}

    def engine(self, **options: int) -> Engine:
        return Engine(self.spec, self.weights, EngineOptions(**options), dtype=self.dtype, tp_group=self.tp_group)

    def alone(self, sample_id: int, block_tokens: int) -> GenerationResult:
        """The sample in an engine that holds nothing else, remembers nothing and guesses nothing."""
        if (sample_id, block_tokens) not in self._alone:
            if block_tokens not in self._single_engines:
                self._single_engines[block_tokens] = self.engine(
                    num_blocks=100, block_tokens=block_tokens, draft_rows=0
                )
            engine, request = self._single_engines[block_tokens], self.requests[sample_id]
            engine.load_weights(self.weights)  # forgets every prefix
            self._alone[sample_id, block_tokens] = engine.generate([request.prompt], request.params, [sample_id])[0]
        return self._alone[sample_id, block_tokens]

    def fewest_blocks(self, sample_ids: list[int], block_tokens: int) -> int:
        """Blocks without which an engine must refuse one of these samples."""
        requests = [self.requests[sample_id] for sample_id in sample_ids]
        return max(-(-(len(r.prompt) + r.params.max_tokens - 1) // block_tokens) for r in requests)


def move(source: Engine, destination: Engine, sample_ids: list[int], *, with_kv: bool, as_bytes: bool) -> list[int]:
    """Samples leave one engine and enter the other, as they are or through what travels between processes."""
    mode = "kv" if with_kv else "tokens"
    with source.export_sequences(sample_ids, mode) as transfer:
        if as_bytes and transfer.manifest.num_blocks:
            transfer = through_bytes(transfer)
        return import_sequences(destination, transfer)


class EnginePair:
    """Two engines with the same block size; `options[i]` are those of engine i."""

    def __init__(self, workload: Workload, options: list[dict[str, int]]) -> None:
        self.workload = workload
        self.engines = [workload.engine(**each) for each in options]
        self.block_tokens = options[0]["block_tokens"]
        self.paused = [False, False]
        self.seen: Counter[str] = Counter()
        self.finished: set[int] = set()
        self.aborted: set[int] = set()

    def guess_by_rule(self, kinds: tuple[str, str], rng: random.Random) -> None:
        """Let each engine's guesses be what tests/gen/scripted_drafts.py says; "own" stays as it is."""

        def known(sample_id: int) -> tuple[int, ...]:
            return self.workload.alone(sample_id, self.block_tokens).tokens

        for engine, kind in zip(self.engines, kinds):
            if engine.drafter and kind != "own":
                engine.drafter = ScriptedDrafter(self.workload.spec.vocab, engine.drafter.draft_rows, kind, known, rng)

    def unfinished(self, which: int) -> list[int]:
        return [state.sample_id for state in self.engines[which].unfinished()]

    def add(self, which: int, sample_id: int) -> None:
        request = self.workload.requests[sample_id]
        self.engines[which].add(sample_id, request.prompt, request.params)
        self.aborted.discard(sample_id)
        self.check(which)

    def abort(self, which: int, sample_id: int) -> None:
        self.engines[which].abort(sample_id)
        self.aborted.add(sample_id)
        self.seen["aborted"] += 1
        self.check(which)

    def preempt(self, which: int) -> None:
        self.seen["preempted by hand"] += len(self.engines[which].scheduler.running)
        self.engines[which].scheduler.preempt_all()
        self.check(which)

    def reload(self, which: int) -> None:
        self.engines[which].load_weights(self.workload.weights)
        self.seen["weights loaded"] += 1
        self.check(which)

    def move(self, source: int, sample_ids: list[int], with_kv: bool, as_bytes: bool) -> None:
        here, there = self.engines[source], self.engines[1 - source]
        recomputed = move(here, there, sample_ids, with_kv=with_kv, as_bytes=as_bytes)
        self.seen["moved as tokens"] += len(recomputed)
        self.seen["moved with KV"] += len(sample_ids) - len(recomputed)
        self.check(0)
        self.check(1)

    def pause(self, which: int) -> None:
        self.engines[which].pause()
        self.paused[which] = True
        self.seen["paused"] += 1
        self.check(which)

    def resume(self, which: int) -> None:
        self.engines[which].resume()
        self.paused[which] = False
        self.check(which)

    def step(self, which: int) -> None:
        """One step of one engine, if it is not paused; its results must be those of the samples alone."""
        if self.paused[which]:
            return
        engine = self.engines[which]
        before = {state.sample_id for state in engine.unfinished() if not state.waiting}
        for result in engine.step():
            expected = self.workload.alone(result.sample_id, self.block_tokens)
            assert result == expected, f"sample {result.sample_id}:\n{result}\nalone:\n{expected}\n{engine.options}"
            assert result.sample_id not in self.finished | self.aborted, f"sample {result.sample_id} ended twice"
            self.finished.add(result.sample_id)
        self.check(which)
        self._note(engine, before)

    def drain(self) -> None:
        """Run both engines to the end; every sample that entered has then left exactly once, and every block too."""
        steps = 0
        while any(engine.has_unfinished() for engine in self.engines):
            for which in (0, 1):
                if self.paused[which]:
                    self.resume(which)
                self.step(which)
            steps += 1
            assert steps < 10_000, "no progress"
        for engine in self.engines:
            assert engine.free_blocks == engine.options.num_blocks

    def check(self, which: int) -> None:
        self.engines[which].check_integrity()

    def _note(self, engine: Engine, ran_before: set[int]) -> None:
        states = engine.unfinished()
        for state in states:  # none for a guess that was wrong
            assert state.blocks == -(-state.kv_tokens // self.block_tokens), f"{state}\n{engine.options}"
        self.seen["steps"] += 1
        self.seen["guesses right"] += engine.last_step.accepted_tokens
        self.seen["guesses wrong"] += engine.last_step.drafted_tokens - engine.last_step.accepted_tokens
        self.seen["preempted for lack of blocks"] += sum(s.waiting and s.sample_id in ran_before for s in states)
        self.seen["chunked"] += any(not s.waiting and s.kv_tokens < s.total_tokens - 1 for s in states)
        held = engine.options.num_blocks - engine.free_blocks
        self.seen["prefix shared"] += sum(s.blocks for s in states) > held
