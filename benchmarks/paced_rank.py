"""One of many forked ranks whose work lasts as long as it is priced: stages that train, or an instance that generates.

Models are as small as they can be; every side must leave the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from inter_stage import ROLES
from inter_stage_rank import FusionRank
from intra_stage_rank import Part, gradient_digest, policy_loss, value_loss
from random_models import ModelRank, barrier, together

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import OptimizerConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.paced import PacedCost
from rlhfuse.fusion.intra.executor import PipelineParts, PipelineWork, ProgramExecutor
from rlhfuse.fusion.intra.p2p import Channels
from rlhfuse.models.stage import PackedTokens, PipelineStage, TrainingStage
from rlhfuse.monitor.pace import PacedClock
from rlhfuse.parallel.groups import trained_grid
from rlhfuse.parallel.optimizer import ModelOptimizer
from rlhfuse.schedule.ir.ranks import FusedRanks, neighbour_pairs, rank_map
from rlhfuse.schedule.program.program import Program
from rlhfuse.tasks.instance_limits import InstanceLimits

HIDDEN, VOCAB, TOKENS = 64, 64, 64  # tokens of a micro-batch
Prices = Mapping[tuple[str, str], float]  # seconds by (model, kind of action)


@dataclass(frozen=True)
class Stages:
    """Layouts of actor and critic that share ranks, one layer a stage, and micro-batches of an actor pipeline."""

    actor: str
    critic: str
    microbatches: int

    @property
    def layouts(self) -> dict[str, ParallelLayout]:
        return {"actor": ParallelLayout.parse(self.actor), "critic": ParallelLayout.parse(self.critic)}

    @property
    def ranks(self) -> FusedRanks:
        return rank_map(self.layouts)

    def spec(self, model: str) -> ModelSpec:
        return ModelSpec("llama", self.layouts[model].pp, HIDDEN, 1, 1, HIDDEN, HIDDEN, VOCAB, TOKENS)


class PacedStages(ModelRank):
    """The stages of both models on this rank."""

    def __init__(self, rank: int, stages: tuple[str, str, int]) -> None:
        self.stages = Stages(*stages)
        super().__init__(rank, self.stages.ranks.size)
        self.parts = {model: self._part(model) for model in self.stages.layouts}
        pairs = [pair for part in self.parts.values() for pair in neighbour_pairs(part.grid.cells, part.grid.layout)]
        self.channels = Channels(rank, self.maker.channels("pipeline", pairs), self.device.torch_device)
        self.channels.connect()
        generator = torch.Generator().manual_seed(1)
        count = self.stages.microbatches * self.stages.layouts["actor"].dp
        tokens = torch.randint(3, VOCAB, (count, TOKENS), generator=generator).tolist()
        self.batches = [PackedTokens.pack([one], torch.device("cpu")) for one in tokens]
        self.losses = {"actor": policy_loss(VOCAB, self.batches), "critic": value_loss(self.batches)}

    def _part(self, model: str) -> Part:
        grid, head = trained_grid(self.stages.ranks, model), model == "critic"
        number = grid.position(self.rank)[1]
        built = self.llama(model, self.stages.spec(model), grid, head, 1 + number)
        groups = self.groups(model, grid)
        optimizer = ModelOptimizer({number: built}, OptimizerConfig(), groups, self.device)
        ends = PipelineStage(optimizer.module, first=number == 0, last=number == grid.layout.pp - 1, scalar_head=head)
        return Part(grid, number, TrainingStage(ends), optimizer, groups)

    def load(self, sides: Mapping[str, Sequence[Sequence[str]]], prices: Mapping[str, Prices]) -> None:
        """`sides[name][phase][rank]`: the text of a program; phases are parted by a barrier. `prices`: by side."""
        names = {self.stages.ranks.pipeline_of(model, self.rank): model for model in self.parts}
        self.prices, self.side = prices, ""
        self.clock = PacedClock(
            self.rank, {"action": lambda model, action, _: self.prices[self.side][model, str(action.kind)]}
        )
        parts = {
            name: PipelineParts(
                model,
                {self.parts[model].number: self.parts[model].stage},
                self.parts[model].optimizer,
                torch.float32,
            )
            for name, model in names.items()
        }
        self.sides = {}
        for side, phases in sides.items():
            programs = [Program.parse(texts[self.rank]) for texts in phases]
            self.sides[side] = [
                ProgramExecutor(one, parts, self.channels, lambda _: None, self.clock) for one in programs
            ]
        self.work = {name: self._work(name, model) for name, model in names.items()}

    def _work(self, name: str, model: str) -> PipelineWork:
        """A model's pipelines take the micro-batches in turn."""
        count, first = self.stages.layouts[model].dp, int(name.partition(".")[2] or 0)
        own, loss = self.batches[first::count], self.losses[model]
        rows = (TOKENS,) * len(own)
        return PipelineWork(rows, own.__getitem__, lambda output, n: loss(output, n * count + first), lr=0.0)

    def run(self, side: str) -> dict[str, Any]:
        """Train a mini-batch from a barrier on."""
        self.side = side
        for part in self.parts.values():
            part.optimizer.zero_grad()
        with together():
            self.clock.take_pace()
            start = time.perf_counter()
            for number, executor in enumerate(self.sides[side]):
                if number:
                    barrier()
                executor.run(self.work)
            end = time.perf_counter()
        barrier()  # nobody counts the machine's seconds before all are done
        return {"start": start, "end": end, "stats": tuple(self.clock.take_pace())}

    def digest(self) -> str:
        return gradient_digest(self.parts.values())


class PacedInstance(FusionRank):
    """A generation instance and an inference worker."""

    def __init__(self, rank: int, sizes: dict[str, Any], seed: int, cost: dict[str, Any]) -> None:
        self.clock = PacedClock(rank, PacedCost.from_dict(cost, "costs").prices(len(ROLES) - 1))
        super().__init__(rank, sizes, seed, self.clock)

    def run(self, threshold: int, limits: InstanceLimits) -> dict[str, Any]:
        self.clock.take_pace()
        start = time.perf_counter()
        told = super().run(threshold, limits)
        barrier()
        return {**told, "start": start, "end": time.perf_counter(), "stats": tuple(self.clock.take_pace())}
