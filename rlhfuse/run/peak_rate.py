"""How many floating-point operations a second this rank could do at its best: what utilisation is measured against.

CUDA    the data sheet, for bfloat16 on the GPUs that costs/hardware.py knows by name
CPU     measured: matrix products on all ranks side by side, since they share the cores
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from rlhfuse.base.clock import Clock
from rlhfuse.costs.hardware import GPU_NAMES, data_sheets
from rlhfuse.parallel.device import Device

SIDE = 512  # of the matrices: large enough for a core's best rate, small enough for many in MEASURED_SECONDS
MEASURED_SECONDS = 0.2


def peak_flops(dtype: torch.dtype, device: Device) -> float | None:
    """FLOP/s of one rank, the mean over the ranks where it is measured, None where not known; a collective."""
    if not device.is_cuda:
        return _measured_flops(dtype)
    sheet = GPU_NAMES.get(torch.cuda.get_device_name(device.torch_device))
    return data_sheets()[sheet].flops if sheet and dtype is torch.bfloat16 else None


def peak_line(flops: float | None, device: Device) -> str:
    """What utilisation is measured against, for people."""
    if flops is None and not device.is_cuda:
        return "no perf/mfu: in a paced run work waits"
    if flops is None:
        name = torch.cuda.get_device_name(device.torch_device)
        return f"no perf/mfu: the peak of {name} in this number format is not known"
    return f"perf/mfu/* are shares of {flops / 1e12:.4g} TFLOP/s per rank"


def _measured_flops(dtype: torch.dtype) -> float:
    """FLOP/s of a rank in products that all ranks compute at the same time."""
    matrix = torch.ones(SIDE, SIDE, dtype=dtype)
    out = matrix @ matrix
    dist.barrier()
    products, work = 0, Clock().begin()
    while work.seconds < MEASURED_SECONDS:
        torch.matmul(matrix, matrix, out=out)
        products += 1
    rate = torch.tensor(2 * SIDE**3 * products / work.seconds, dtype=torch.float64)
    dist.all_reduce(rate)
    return float(rate) / dist.get_world_size()
