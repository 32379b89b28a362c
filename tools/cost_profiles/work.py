"""The work that is measured: decode steps, prefills, scoring, training, loading, on models with random weights.

Each kind is built once and then run at a point; a run returns its seconds, once the device is done. Checkpoints are
not read, only their shapes.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from cost_profiles.points import Points

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.engine import Engine, SamplingParams
from rlhfuse.models.build import WHOLE, Activations, build_model
from rlhfuse.models.stage import PackedTokens, PipelineStage, TrainingStage
from rlhfuse.parallel.device import Device
from rlhfuse.parallel.groups import GroupMaker, plain_grid
from rlhfuse.parallel.offload import OffloadedWeights
from rlhfuse.run.rank_models import engine_options
from rlhfuse.tasks.role import POLICY, Role


@dataclass(frozen=True)
class Builder:
    """Builds whole models for one rank, in replicas of `tp` ranks over the whole world; a collective."""

    rank: int
    world: int
    device: Device
    dtype: torch.dtype
    groups: GroupMaker

    def build(
        self, purpose: str, role: Role, spec: ModelSpec, tp: int, activations: Activations = WHOLE
    ) -> tuple[torch.nn.Module, dist.ProcessGroup]:
        """A model of random weights, and its tensor-parallel group."""
        grid = plain_grid(ParallelLayout(self.world // tp, tp, 1))
        groups = self.groups.for_model(purpose, grid, self.rank)
        kind: dict[str, Any] = {"scalar_head": role.scalar_head, "dtype": self.dtype, "activations": activations}
        model = build_model(spec, grid, groups, self.rank, device=self.device, **kind)
        randomise(model)
        return model, groups.tp


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Matrices like those of a fresh model, vectors of ones."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0)


class GenerationWork:
    """An engine of the run's size."""

    def __init__(self, config: RunConfig, spec: ModelSpec, points: Points, builder: Builder, tp: int) -> None:
        model, group = builder.build("generation", POLICY, spec, tp)
        model.requires_grad_(False)
        self._random = random.Random(0)  # the same on every rank of the instance
        self._vocab, self._context = spec.vocab, spec.context
        self._batched_tokens = max(points.tokens)
        self._next = 0
        # blocks of the run, those for tokens drawn while measuring, and enough for the largest prefill
        run = engine_options(config, 1)
        most, size = max(points.sequences), run.block_tokens
        blocks = max(points.capacity // size + 2 * max(points.batches), max(points.tokens) // size + most)
        sequences = max(run.max_sequences, most)
        self.engine = Engine(
            spec,
            dict(model.named_parameters()),
            # without guesses: acceptance is the policy's, and a run measures it
            replace(
                run,
                num_blocks=blocks,
                max_sequences=sequences,
                max_batched_tokens=self._batched_tokens,
                draft_rows=0,
            ),
            device=builder.device.torch_device,
            dtype=builder.dtype,
            tp_group=group if tp > 1 else None,
        )

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of `steps` decode steps of `batch` sequences that hold about `context` tokens each."""
        filling = -(-batch * context // self._batched_tokens) + 1  # steps in which the first ones draw already
        drawn = filling + steps + 1
        prompt = max(1, min(context - drawn // 2, self._context - drawn - filling))
        ids = self._enter([prompt] * batch, drawn + filling)
        seconds: list[float] = []
        while len(seconds) <= steps:  # the first one warms up
            self.engine.step()
            stats = self.engine.last_step
            if stats.batch and not stats.prefill_tokens:
                seconds.append(stats.seconds)
            if not self.engine.has_unfinished():
                break
        self._leave(ids)
        return seconds[1:]

    def prefill(self, tokens: int, sequences: int) -> float:
        """Seconds of one prefill step."""
        lengths = [tokens // sequences + (place < tokens % sequences) for place in range(sequences)]
        ids = self._enter(lengths, 1)
        self.engine.step()
        self.engine.settle()
        seconds = self.engine.last_step.seconds
        self._leave(ids)
        return seconds

    def _enter(self, prompts: list[int], max_tokens: int) -> list[int]:
        ids = list(range(self._next, self._next + len(prompts)))
        self._next += len(prompts)
        for sample_id, length in zip(ids, prompts):
            prompt = [self._random.randrange(self._vocab) for _ in range(length)]
            self.engine.add(sample_id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        return ids

    def _leave(self, ids: list[int]) -> None:
        unfinished = {state.sample_id for state in self.engine.unfinished()}
        for sample_id in ids:
            if sample_id in unfinished:
                self.engine.abort(sample_id)


class ScoreWork:
    """One frozen model, its weights offloaded or in use."""

    def __init__(self, config: RunConfig, role: Role, spec: ModelSpec, builder: Builder, tp: int) -> None:
        model, _ = builder.build(f"{role}_inference", role, spec, tp)
        model.requires_grad_(False)
        self.offloaded = OffloadedWeights(model, builder.device)
        self._stage = PipelineStage(model, first=True, last=True, scalar_head=role.scalar_head)
        self._vocab, self._temperature, self._device = spec.vocab, config.rollout.temperature, builder.device

    @torch.no_grad()
    def score(self, tokens: int, sequences: int) -> float:
        """Seconds of one packed forward, with the log-probabilities where there is an output layer."""
        packed = pack(tokens, sequences, self._device)
        self._device.synchronize()
        start = time.perf_counter()
        out = self._stage.forward(packed, None)
        if not self._stage.scalar_head:
            out.logprobs(slice(tokens), packed.tokens[:tokens], self._vocab, self._temperature)
        self._device.synchronize()
        return time.perf_counter() - start


def load_seconds(works: list[ScoreWork], device: Device) -> float:
    """Bringing all offloaded models in, one after the other, as a worker does."""
    for work in works:
        work.offloaded.offload()
    start = time.perf_counter()
    for work in works:
        work.offloaded.load()
    device.synchronize()
    return time.perf_counter() - start


class TrainingWork:
    """A trained model of so many layers with both ends, without its optimizer."""

    def __init__(self, config: RunConfig, role: Role, spec: ModelSpec, layers: int, builder: Builder, tp: int) -> None:
        activations = Activations.of(config.parallel, config.trainer)
        spec = replace(spec, layers=layers)
        model, _ = builder.build(f"{role}_train", role, spec, tp, activations)
        self._stage = PipelineStage(model, first=True, last=True, scalar_head=role.scalar_head)
        self._training = TrainingStage(self._stage)
        for weight in model.parameters():  # a stage adds gradients there, as with an optimizer
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        self._vocab, self._temperature, self._device = spec.vocab, config.rollout.temperature, builder.device

    def step(self, tokens: int, longest: int) -> tuple[float, float]:
        """Seconds of forward and loss, and of the backward, of one micro-batch of sequences of up to `longest`."""
        forward, backward, _ = self._step(tokens, longest)
        return forward, backward

    def split_step(self, tokens: int, longest: int) -> tuple[float, float]:
        """Seconds of B and W of its backward, split."""
        self._training.split_backward(True)
        _, *parts = self._step(tokens, longest)
        self._training.split_backward(False)
        return parts[0], parts[1]

    def _step(self, tokens: int, longest: int) -> tuple[float, float, float]:
        packed = pack(tokens, -(-tokens // longest), self._device, self._stage.shards)

        def loss(out: Any, microbatch: int) -> torch.Tensor:
            if self._stage.scalar_head:
                return out[:tokens].float().square().mean()
            labels = packed.tokens[:tokens]
            return out.loss(
                lambda logprobs, *_: -logprobs.sum() / tokens, slice(tokens), labels, self._vocab, self._temperature
            )

        marks = [self._now()]
        self._training.forward(0, packed, None, loss)
        marks.append(self._now())
        self._training.backward(0, None)
        marks.append(self._now())
        if self._training.splits:
            self._training.backward_weight(0)
        marks.append(self._now())
        forward, backward, weights = (after - before for before, after in zip(marks, marks[1:]))
        return forward, backward, weights

    def _now(self) -> float:
        """When the device has done all that was asked of it."""
        self._device.synchronize()
        return time.perf_counter()


def pack(tokens: int, sequences: int, device: Device, shards: int = 1) -> PackedTokens:
    """`tokens` tokens in `sequences` sequences of nearly the same length."""
    lengths = [tokens // sequences + (place < tokens % sequences) for place in range(sequences)]
    rows = [[1 + place % 7] * length for place, length in enumerate(lengths)]
    return PackedTokens.pack(rows, device.torch_device, shards)
