"""Weights from one layout to another, by Megatron-core's resharding (plan, execute, transport).

The plan is made on first use and kept on the destination module by Megatron. Only the transport is chosen
here: gloo on CPU, NCCL on CUDA. Values are copied bit for bit.
"""

from __future__ import annotations

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
    def move(self, source: torch.nn.Module, destination: torch.nn.Module) -> None:
        """Copy `source`'s weights into `destination`'s parameters, whatever their layouts."""
        reshard_model_weights(source, destination, self._service)
