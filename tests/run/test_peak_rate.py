"""What utilisation is measured against: by the GPU's name, measured on a CPU, or not known."""

import math

import pytest
import torch

from rlhfuse.costs.hardware import GPU_NAMES, data_sheets, hardware_by_name
from rlhfuse.parallel.device import Device
from rlhfuse.run.peak_rate import peak_flops, peak_line

CPU, CUDA = Device(torch.device("cpu"), "gloo"), Device(torch.device("cuda", 0), "nccl")


@pytest.mark.parametrize(
    "name, dtype, sheet",
    [
        ("NVIDIA H200", torch.bfloat16, "h200"),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, "h100"),
        ("NVIDIA H100 80GB HBM3", torch.float32, None),  # the sheet is about bf16
        ("NVIDIA H100 PCIe", torch.bfloat16, None),  # another card
    ],
)
def test_a_gpu_is_known_by_its_name(monkeypatch, name, dtype, sheet):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    found = peak_flops(dtype, CUDA)
    assert found == (data_sheets()[sheet].flops if sheet else None)
    if not sheet:
        assert name in peak_line(found, CUDA)


def test_every_name_is_of_a_gpu_in_the_table():
    assert hardware_by_name(GPU_NAMES["NVIDIA A100-SXM4-80GB"]).memory_bytes == 80e9


def test_a_cpu_is_measured(alone):
    found = peak_flops(torch.float32, CPU)
    assert found > 0 and math.isfinite(found) and "TFLOP/s per rank" in peak_line(found, CPU)
