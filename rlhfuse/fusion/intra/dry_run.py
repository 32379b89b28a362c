"""Every stage forward, backward and stepped once before the first program, with nothing left of it.

What CUDA, cuBLAS and NCCL make at first use they make here, where no transfer is under way: later a receive that waits
would hold it up, and whoever sends to it would wait for this rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rlhfuse.fusion.intra.executor import PipelineParts, PipelineWork


def dry_run(pipelines: Iterable[tuple[PipelineParts, PipelineWork]], device: torch.device) -> None:
    """The stages of this rank's pipelines, each on its first micro-batch, and their optimizers; a collective.

    Gradients must have memory and hold nothing afterwards; weights, moments and counters keep their bits.
    """
    for parts, work in pipelines:
        batch = work.packed(0)
        for stage in parts.stages.values():
            shape = stage.stage.hidden_shape(len(batch))
            hidden = None if stage.stage.first else torch.zeros(shape, dtype=parts.dtype, device=device)
            out = stage.forward(0, batch, hidden, work.loss)
            stage.backward(0, None if out is None else torch.zeros_like(out))
            if stage.splits:
                stage.backward_weight(0)
        parts.optimizer.zero_grad()
        parts.optimizer.dry_step()
        parts.optimizer.zero_grad()
