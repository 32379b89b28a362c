"""A middle stage of some layers with its optimizer, alone on one rank, for checks that time or disturb it."""

from __future__ import annotations

from typing import Any

import torch
from cost_profiles.work import randomise
from gpu_checks.bench import Bench
from gpu_checks.speed import spec_of

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import OptimizerConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.build import build_model
from rlhfuse.models.stage import PackedTokens, PipelineStage
from rlhfuse.parallel.groups import GroupMaker, plain_grid
from rlhfuse.parallel.optimizer import ModelOptimizer

STAGES = 3  # of the pipeline that the rank holds one of


def stage_size(bench: Bench) -> str:
    """The widths of 8B on a GPU, tiny ones elsewhere."""
    return "8b" if bench.on_gpu else "tiny"


class MiddleStage:
    """Stage 1 of three with `layers` layers in bfloat16, or the last one with the head; needs a process group."""

    def __init__(self, size: str, layers: int, bench: Bench, last: bool = False) -> None:
        self.spec: ModelSpec = spec_of(size, num_hidden_layers=STAGES * layers)
        self._bench, number = bench, STAGES - 1 if last else 1
        grid = plain_grid(ParallelLayout(1, 1, STAGES))  # of which this rank is alone here
        self.groups = GroupMaker(60.0).for_model("stage", plain_grid(ParallelLayout(1, 1, 1)), 0)
        sizes: dict[str, Any] = {"scalar_head": False, "dtype": torch.bfloat16, "device": bench.device, "stage": number}
        self.model = build_model(self.spec, grid, self.groups, number, **sizes)
        randomise(self.model)
        self.optimizer = ModelOptimizer({number: self.model}, OptimizerConfig(lr=1e-5), self.groups, bench.device)
        self.stage = PipelineStage(self.optimizer.modules[number], first=False, last=last, scalar_head=False)
        self.optimizer.zero_grad()

    def batch(self, lengths: list[int]) -> PackedTokens:
        rows = [[3 + i % 50 for i in range(length)] for length in lengths]
        return PackedTokens.pack(rows, self._bench.where)

    def hidden(self, batch: PackedTokens) -> torch.Tensor:
        """What the stage before would send."""
        shape = self.stage.hidden_shape(len(batch))
        return torch.randn(shape, dtype=torch.bfloat16, device=self._bench.where).requires_grad_(True)

    def forward(self, batch: PackedTokens) -> torch.Tensor:
        return self.stage.forward(batch, self.hidden(batch))

    def train(self, batch: PackedTokens) -> None:
        """Forward and backward; the last stage's loss is the mean log-probability of some targets."""
        output: Any = self.forward(batch)
        if self.stage.last:
            mean = lambda logprobs, entropy, rows: logprobs.sum() / len(batch)  # noqa: E731
            output = output.loss(mean, slice(None), batch.tokens, self.spec.vocab, 1.0)
        self.backward(output)

    def backward(self, output: torch.Tensor) -> None:
        with self.stage.running():
            torch.autograd.backward(output, torch.ones_like(output))
