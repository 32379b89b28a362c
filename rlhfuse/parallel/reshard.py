"""Weights from one layout to another, by Megatron-core's resharding (plan, execute, transport).

The plan is made on first use and kept on the destination module by Megatron. Only the transport is chosen
here: gloo on CPU, NCCL on CUDA. Values are copied bit for bit.
"""

from __future__ import annotations

from typing import Iterable, Sequence

import torch
import torch.distributed as dist
from megatron.core.resharding.copy_services.base import CopyService
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService
from megatron.core.resharding.refit import reshard_model_weights

from rlhfuse.parallel.device import Device


class _GlooTransport(GlooCopyService):
    """Megatron's gloo transport over the default group and without the CUDA stream that it always makes."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.gloo_pg = None
        self.send_ops = []
        self.recv_ops = []
        self._copy_stream = None


class _NcclTransport(NCCLCopyService):
    """Megatron's NCCL transport; its copies within a rank wait for the work that wrote the source weights."""

    def run(self) -> None:
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        super().run()


class Resharder:
    """Moves a model's weights between two built modules. Every rank of both layouts must call `move`."""

    def __init__(self, device: Device) -> None:
        self._service: CopyService = _NcclTransport() if device.is_cuda else _GlooTransport()

    @torch.no_grad()
    def move(self, source: Iterable[torch.nn.Module], destination: torch.nn.Module) -> None:
        """Copy a model's weights into `destination`'s parameters, whatever the layouts.

        `source`: this rank's chunks of the model, one where it is not interleaved.
        """
        chunks = [getattr(chunk, "module", chunk) for chunk in source]
        reshard_model_weights(chunks[0] if len(chunks) == 1 else _Joined(chunks), destination, self._service)


class _Joined(torch.nn.Module):
    """All chunks of a rank under the names of one part that has all their layers; Megatron's planner takes one module.

    Each layer keeps its global number, by which the planner knows it.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.config, self.pg_collection = chunks[0].config, chunks[0].pg_collection
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(layer for chunk in chunks for layer in chunk.decoder.layers)
        for chunk in chunks:
            if chunk.pre_process:
                self.embedding = chunk.embedding
            if chunk.post_process:
                self.decoder.final_layernorm, self.output_layer = chunk.decoder.final_layernorm, chunk.output_layer
