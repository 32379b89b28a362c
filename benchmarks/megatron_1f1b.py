"""Megatron-core's own 1F1B over this project's stages: what the executor is held against, in bits and in time.

`forward_backward_pipelining_without_interleaving` decides here what runs when and moves every tensor; stages, packed
micro-batches and losses are the executor's own, so both do the same arithmetic. Micro-batches of one length travel
at a fixed shape, which is Megatron's faster way; others have their shapes sent ahead (`variable_seq_lengths`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from rlhfuse.models.stage import LossFunction, PackedTokens, PipelineStage
from rlhfuse.parallel.device import Device
from rlhfuse.parallel.groups import GroupMaker, ModelGrid


def with_pipeline_group(
    groups: ProcessGroupCollection, maker: GroupMaker, purpose: str, grid: ModelGrid, rank: int
) -> ProcessGroupCollection:
    """`groups` with the pipeline's as one that communicates, which only Megatron's schedules ask for; a collective."""
    added = copy.copy(groups)
    for cells in grid.cells:
        for ranks in zip(*cells):
            made = maker.group(f"{purpose}.pp", ranks)
            added.pp = made if rank in ranks else added.pp
    return added


def megatron_1f1b(
    stage: PipelineStage,
    batches: Sequence[PackedTokens],
    loss: LossFunction,
    groups: ProcessGroupCollection,
    device: Device,
) -> list[Tensor]:
    """One pipeline's micro-batches through forward and backward; a collective over `groups.pp`.

    `groups` are what the stage's model was built with, and a pipeline group. Returns the losses in micro-batch order
    on the last stage, an empty list elsewhere.
    """
    config = getattr(stage.model, "module", stage.model).config
    lengths = {len(batch) for batch in batches}
    numbered = iter(enumerate(batches))

    def forward_step(data: Iterator[tuple[int, PackedTokens]], model: torch.nn.Module) -> tuple[Tensor, Any]:
        number, batch = next(data)
        out = stage.compute(batch)
        # a count of 0 tokens, which Megatron only adds up: the loss is divided already
        return out, lambda last: ((value := loss(last, number)), torch.zeros([], dtype=torch.int), value.detach())

    saved = config.variable_seq_lengths, config.batch_p2p_sync
    config.variable_seq_lengths = len(lengths) > 1
    config.batch_p2p_sync = device.is_cuda
    try:
        with _cuda_questions_answered(device):
            return forward_backward_pipelining_without_interleaving(
                forward_step_func=forward_step,
                data_iterator=numbered,
                model=stage.model,
                num_microbatches=len(batches),
                seq_length=max(lengths),
                micro_batch_size=1,
                p2p_communicator=P2PCommunicator(groups.pp, config),
                pg_collection=groups,
            )
    finally:
        config.variable_seq_lengths, config.batch_p2p_sync = saved


@contextlib.contextmanager  # Megatron asks CUDA for its device in the middle of a step: here the CPU answers
def _cuda_questions_answered(device: Device) -> Iterator[None]:
    if device.is_cuda:
        yield
        return
    zeros = torch.zeros

    def zeros_here(*size: Any, device: Any = None, **options: Any) -> Tensor:
        return zeros(*size, device="cpu" if device == "cuda" else device, **options)

    with (
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(torch.cuda, "synchronize", lambda: None),
        patch.object(torch, "zeros", zeros_here),
    ):
        yield
