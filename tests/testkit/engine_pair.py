"""Two engines to which things happen between steps, and the runs of each sample alone to compare them with.

    Workload    one small model, a pool of requests, and the result of each request run by itself
    EnginePair  two engines of that workload: add, abort, preempt, move, pause, resume; every step is followed by
                check_integrity, and every finished sample must be, bit for bit, what it is alone
    draw_pair, serve  such a pair of random sizes, and random things that happen to it

`EnginePair.seen` counts what really happened, so that a test can show that its cases were not empty.
"""

import random
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.engine import Engine, GenerationResult, SamplingParams
from testkit.gen_models import engine_of, random_weights, tiny_spec
from testkit.moves import move_sequences
from testkit.scripted_guesses import KINDS, ScriptedGuesser

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
        return engine_of(self.spec, self.weights, dtype=self.dtype, tp_group=self.tp_group, **options)

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
        """Let each engine's guesses be what testkit/scripted_guesses.py says; "own" stays as it is."""

        def known(sample_id: int) -> tuple[int, ...]:
            return self.workload.alone(sample_id, self.block_tokens).tokens

        for engine, kind in zip(self.engines, kinds):
            if engine.loop.guesser and kind != "own":
                engine.loop.guesser = ScriptedGuesser(
                    self.workload.spec.vocab, engine.loop.guesser.most_rows, kind, known, rng
                )

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

    def disturb(self, which: int, *, reload: bool) -> None:
        """Preempt all of an engine's samples, or give it its weights again."""
        engine = self.engines[which]
        if reload:
            engine.load_weights(self.workload.weights)
            self.seen["weights loaded"] += 1
        else:
            self.seen["preempted by hand"] += len(engine.scheduler.running)
            engine.scheduler.preempt_all()
        self.check(which)

    def move(self, source: int, sample_ids: list[int], with_kv: bool, as_bytes: bool) -> None:
        here, there = self.engines[source], self.engines[1 - source]
        recomputed = move_sequences(here, there, sample_ids, "kv" if with_kv else "tokens", as_bytes)
        self.seen["moved as tokens"] += len(recomputed)
        self.seen["moved with KV"] += len(sample_ids) - len(recomputed)
        self.check(0)
        self.check(1)

    def pause(self, which: int, on: bool) -> None:
        engine = self.engines[which]
        engine.pause() if on else engine.resume()
        self.paused[which] = on
        self.seen["paused"] += on
        self.check(which)

    def step(self, which: int) -> None:
        """One step of one engine, if it is not paused; its results must be those of the samples alone."""
        if self.paused[which]:
            return
        engine = self.engines[which]
        before = self.running(engine)
        for result in engine.step():
            self.take(result)
        self.check(which)
        self.seen["steps"] += 1
        self.seen["guesses right"] += engine.last_step.accepted_tokens
        self.seen["guesses wrong"] += engine.last_step.guessed_tokens - engine.last_step.accepted_tokens
        self.note(engine, before)

    def take(self, result: GenerationResult) -> None:
        """A sample has ended."""
        self.compare(result, self.workload.alone(result.sample_id, self.block_tokens))
        assert result.sample_id not in self.finished | self.aborted, f"sample {result.sample_id} ended twice"
        self.finished.add(result.sample_id)
        self.seen[result.finish_reason] += 1

    def running(self, engine: Engine) -> set[int]:
        return {seq.sample_id for seq in engine.scheduler.running}

    def compare(self, result: GenerationResult, alone: GenerationResult) -> None:
        assert result == alone, f"sample {result.sample_id}:\n{result}\nalone:\n{alone}"

    def drain(self) -> None:
        """Run both engines to the end; every sample that entered has then left exactly once, and every block too."""
        steps = 0
        while any(engine.samples or engine.has_unfinished() for engine in self.engines):
            for which in (0, 1):
                if self.paused[which]:
                    self.pause(which, on=False)
                self.step(which)
            steps += 1
            assert steps < 10_000, "no progress"
        for engine in self.engines:
            assert engine.free_blocks == engine.options.num_blocks

    def check(self, which: int) -> None:
        self.engines[which].scheduler.check_integrity()

    def note(self, engine: Engine, ran_before: set[int]) -> None:
        """See what a step left behind."""
        engine.settle()
        running, waiting = engine.scheduler.running, engine.scheduler.waiting
        for seq in running:  # none for a guess that was wrong
            assert len(seq.block_table) == -(-seq.computed_tokens // self.block_tokens), f"{seq}\n{engine.options}"
        assert not any(seq.block_table for seq in waiting)
        self.seen["preempted for lack of blocks"] += sum(seq.sample_id in ran_before for seq in waiting)
        self.seen["chunked"] += any(seq.pending_tokens > 1 for seq in running)
        held = engine.options.num_blocks - engine.free_blocks
        self.seen["prefix shared"] += sum(len(seq.block_table) for seq in running) > held


def draw_pair(
    workload: Workload, rng: random.Random, wide: int = 0, kind: type[EnginePair] = EnginePair
) -> tuple[EnginePair, list[int]]:
    """Two engines of random size and the samples that they will serve; `wide`: so many, of more than four blocks."""
    block_tokens = rng.choice((1, 2, 3, 4)) if wide else rng.choice((1, 2, 3, 4, 5, 6, 8, 16))
    fitting = [
        sample_id
        for sample_id, request in workload.requests.items()
        if not wide or len(request.prompt) + len(workload.alone(sample_id, block_tokens).tokens) - 1 > 4 * block_tokens
    ]
    samples = rng.sample(fitting, wide or rng.randint(1, 9))
    fewest = workload.fewest_blocks(samples, block_tokens)
    options = [
        dict(
            block_tokens=block_tokens,
            num_blocks=fewest + int(rng.choice((0, 1, 6)) * rng.random() * fewest),
            max_sequences=rng.randint(8, 40) if wide else rng.randint(1, 12),
            max_batched_tokens=rng.choice((16, 48, 200)) if wide else rng.choice((1, 2, 5, 7, 16, 40, 200)),
            draft_rows=rng.choice((0, 3, 16, 16, 40)),
        )
        for _ in range(2)
    ]
    pair = kind(workload, options)
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
        event = rng.randrange(13)
        if event == 0 and (here := pair.unfinished(which)):
            sample_id = rng.choice(here)
            pair.abort(which, sample_id)
            coming.insert(0, sample_id)  # and asks again later
        elif event in (1, 2, 3):
            pair.disturb(which, reload=event == 3)
        elif event == 4 or (event in (5, 6) and pair.paused[which]):
            pair.pause(which, on=event == 4)
        elif event >= 7 and (here := pair.unfinished(which)):
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
