"""One rank of the intra-stage benchmark: the models' stages on it, and every way of training them.

All sides train the same stages on the same micro-batches at a learning rate of 0, so that every run must leave the same
bits in the gradient buffers. Times are of `time.perf_counter`, which all processes of one machine share.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_1f1b import megatron_1f1b, with_pipeline_group
from random_models import ModelRank, barrier, together
from torch import Tensor

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import OptimizerConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.fusion.intra.executor import PipelineParts, PipelineWork, ProgramExecutor
from rlhfuse.fusion.intra.p2p import Channels
from rlhfuse.fusion.intra.step_report import StepReport
from rlhfuse.models.heads import LanguageOutput
from rlhfuse.models.stage import LossFunction, PackedTokens, PipelineStage, TrainingStage
from rlhfuse.parallel.groups import ModelGrid, trained_grid
from rlhfuse.parallel.optimizer import ModelOptimizer
from rlhfuse.run.rank_models import neighbour_pairs
from rlhfuse.schedule.ir.ranks import FusedRanks, rank_map
from rlhfuse.schedule.program.program import Program

Phase = Callable[[], "StepReport | None"]
RANKS = 2
LAYOUT = ParallelLayout(1, 1, RANKS)
MODELS = ("actor", "critic")
HEAD_DIM = 64
MEGATRON = "megatron_1f1b"  # Megatron's forward_backward_pipelining_without_interleaving, actor, barrier, critic
FORWARD, WHOLE, INPUT, WEIGHT = "F", "B", "B of input", "W"  # the third is a backward that leaves weights to the last
WARM_CYCLES = 2  # of the profile, not counted


@dataclass(frozen=True)
class Sizes:
    """A pair of models, what one of equal micro-batches of them holds, and the samples that unequal ones are cut of."""

    name: str  # "1:1"
    layers: tuple[int, int]  # of actor and critic
    hidden: int
    mlp: int
    vocab: int
    sequences: int  # of one micro-batch
    tokens: int  # of one of them
    samples: int
    longest: int  # of them, in tokens

    def spec(self, model: str) -> ModelSpec:
        layers, heads = self.layers[MODELS.index(model)], self.hidden // HEAD_DIM
        context = max(self.tokens, self.longest)
        return ModelSpec("llama", layers, self.hidden, heads, heads, HEAD_DIM, self.mlp, self.vocab, context)


def rank_layout() -> FusedRanks:
    return rank_map(dict.fromkeys(MODELS, LAYOUT))


@dataclass(frozen=True)
class Part:
    """One model on this rank."""

    grid: ModelGrid
    number: int  # of its stage
    stage: TrainingStage
    optimizer: ModelOptimizer
    groups: ProcessGroupCollection


class TrainingRank(ModelRank):
    """The models of one size on this rank."""

    def __init__(self, rank: int, sizes: dict[str, Any], seed: int) -> None:
        super().__init__(rank, RANKS)
        self.seed, self.sizes = seed, Sizes(**sizes)
        self.generator = torch.Generator().manual_seed(seed)  # of hidden states that are profiled with
        self.parts = {model: self._part(model) for model in MODELS}
        pairs = [pair for part in self.parts.values() for pair in neighbour_pairs(part.grid)]
        self.channels = Channels(rank, self.maker.channels("pipeline", pairs), self.device.torch_device)
        self.channels.connect()

    def _part(self, model: str) -> Part:
        grid, head = trained_grid(rank_layout(), model), model == "critic"
        number = grid.position(self.rank)[1]
        seed = self.seed + 100 * MODELS.index(model) + number
        built = self.llama(model, self.sizes.spec(model), grid, head, seed)
        groups = with_pipeline_group(self.groups(model, grid), self.maker, model, grid, self.rank)
        optimizer = ModelOptimizer({number: built}, OptimizerConfig(), groups, self.device)
        ends = PipelineStage(optimizer.module, first=number == 0, last=number == grid.layout.pp - 1, scalar_head=head)
        return Part(grid, number, TrainingStage(ends), optimizer, groups)

    def load(self, microbatches: Sequence[Sequence[int]], programs: Mapping[str, tuple[tuple[str, ...], ...]]) -> None:
        """Take a case: tokens of each sequence of its micro-batches, and `programs[side][phase][rank]`, the text of
        what a rank runs, phases parted by a barrier."""
        self.batches = batches = draw_batch(self.sizes, microbatches, self.seed)
        self.losses = {"actor": policy_loss(self.sizes.vocab, batches), "critic": value_loss(batches)}
        self.sides = {
            side: [self._phase(Program.parse(texts[self.rank])) for texts in phases]
            for side, phases in programs.items()
        }
        self.sides[MEGATRON] = [self._megatron(model) for model in MODELS]

    def _work(self, model: str, order: Sequence[int]) -> PipelineWork:
        batches, loss = [self.batches[at] for at in order], self.losses[model]
        rows = tuple(map(len, batches))
        return PipelineWork(rows, batches.__getitem__, lambda output, number: loss(output, order[number]), lr=0.0)

    def _phase(self, program: Program) -> Phase:
        parts = {
            model: PipelineParts(model, {part.number: part.stage}, part.optimizer, torch.float32)
            for model, part in self.parts.items()
        }
        executor = ProgramExecutor(program, parts, self.channels, lambda _: None)
        return lambda: executor.run(self.work)

    def _megatron(self, model: str) -> Phase:
        part, loss = self.parts[model], self.losses[model]

        def phase() -> None:
            part.stage.split_backward(False)
            megatron_1f1b(part.stage.stage, self.batches, loss, part.groups, self.device)

        return phase

    def run(self, side: str, order: Sequence[int]) -> dict[str, Any]:
        """Train one mini-batch as `side` does, from a barrier on; of Megatron's own loop only the whole is known.

        `order`: which micro-batch is trained n-th, but by Megatron's loop.
        """
        self.work = {model: self._work(model, order) for model in MODELS}
        for part in self.parts.values():
            part.optimizer.zero_grad()
        reports: list[StepReport] = []
        with together():
            start = time.perf_counter()
            for number, phase in enumerate(self.sides[side]):
                if number:
                    barrier()
                if report := phase():
                    reports.append(report)
            end = time.perf_counter()
        return {
            "start": start,
            "end": end,
            "overhead": sum(report.overhead_seconds for report in reports),  # of the executor itself
            "instructions": sum(report.instructions for report in reports),
            "peak_live": max((report.peak_live for report in reports), default=0),
        }

    def digest(self) -> str:
        return gradient_digest(self.parts.values())

    def profile(
        self, cycles: int, microbatches: int, backwards: Sequence[Sequence[str]]
    ) -> dict[tuple[str, int, str, int], list[float]]:
        """Seconds of each action of this rank's stages on the first `microbatches`, measured without waits while the
        other rank does the same; by (model, stage, what, micro-batch).

        A cycle goes through pairs of micro-batches, forwards of both models first and backwards in reverse, as in a
        fused step: once for each of `backwards`, whole or split.
        """
        found: dict[tuple[str, int, str, int], list[float]] = {}
        for cycle in range(WARM_CYCLES + cycles):
            kept = found if cycle >= WARM_CYCLES else {}
            for part in self.parts.values():
                part.optimizer.zero_grad()
            for backward in backwards:
                for part in self.parts.values():
                    part.stage.split_backward(WEIGHT in backward)
                for first in range(0, microbatches, 2):
                    self._profile_pair(range(first, min(first + 2, microbatches)), backward, kept)
        return found

    def _profile_pair(
        self, pair: Sequence[int], backward: Sequence[str], kept: dict[tuple[str, int, str, int], list[float]]
    ) -> None:
        barrier()
        for what in (FORWARD, *backward):
            for model in MODELS if what == FORWARD else MODELS[::-1]:
                for mb in pair:
                    seconds = self._timed(model, mb, what)
                    if what != FORWARD or WHOLE in backward:
                        kept.setdefault((model, self.parts[model].number, what, mb), []).append(seconds)

    def _timed(self, model: str, mb: int, what: str) -> float:
        stage = self.parts[model].stage
        tensor = torch.randn((len(self.batches[mb]), 1, self.sizes.hidden), generator=self.generator)
        start = time.perf_counter()
        if what == FORWARD:
            stage.forward(mb, self.batches[mb], None if stage.stage.first else tensor, self.losses[model])
        elif what == WEIGHT:
            stage.backward_weight(mb)
        else:
            stage.backward(mb, None if stage.stage.last else tensor / tensor.numel())
        return time.perf_counter() - start


def gradient_digest(parts: Iterable[Part]) -> str:
    """SHA-256 of all gradients on this rank."""
    sha = hashlib.sha256()
    for part in parts:
        for parameter in part.optimizer.module.parameters():
            sha.update(parameter.main_grad.clone().numpy().tobytes())  # numpy pins the memory it looks at
    return sha.hexdigest()


def draw_batch(sizes: Sizes, microbatches: Sequence[Sequence[int]], seed: int) -> tuple[PackedTokens, ...]:
    """Micro-batches of random tokens, of sequences of so many each."""
    generator = torch.Generator().manual_seed(seed)

    def sequence(length: int) -> list[int]:
        return torch.randint(3, sizes.vocab, (length,), generator=generator).tolist()

    return tuple(PackedTokens.pack([*map(sequence, lengths)], torch.device("cpu")) for lengths in microbatches)


def policy_loss(vocab: int, batches: Sequence[PackedTokens]) -> LossFunction:
    """Loss of the token that follows, over all tokens of the mini-batch: the arithmetic of a policy's loss."""
    total = sum(len(batch) for batch in batches)

    def loss(output: LanguageOutput, microbatch: int) -> Tensor:
        targets = batches[microbatch].tokens.roll(-1)
        return output.loss(lambda logprobs, *_: -logprobs.sum() / total, slice(None), targets, vocab, 1.0)

    return loss


def value_loss(batches: Sequence[PackedTokens]) -> LossFunction:
    total = sum(len(batch) for batch in batches)
    return lambda values_T, microbatch: (values_T - 1).square().sum() / total
