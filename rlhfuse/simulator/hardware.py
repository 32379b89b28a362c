"""The machines that the planner knows by name.

A rate is what large kernels reach, not the data sheet: half of the dense bf16 peak, four fifths of the HBM
bandwidth, three fifths of NVLink, four fifths of a NIC or of PCIe. The shares follow what public fits of
analytic cost models to measured runs find (GEMM 0.5, HBM 0.8-1.0, NVLink 0.3-0.6); they are assumptions until
costs are measured on the machine at hand. The floor of a layer, 50 us, is a decoder layer's kernels launched
from a captured graph; without one it is nearer to 0.7 ms.

Knows nothing of models or of torch: who runs on a device and wants `auto` resolved to it passes its name.
"""

from __future__ import annotations

from rlhfuse.errors import InputError
from rlhfuse.spec import HardwareSpec

_GB = 1e9


def _gpu(name: str, peak_flops: float, hbm: float, memory_gb: float, nvlink: float, pcie: float) -> HardwareSpec:
    """A GPU node of eight, from data-sheet rates (bytes/s per direction); NICs are 200 Gb/s per device."""
    return HardwareSpec(
        name=name,
        flops=0.5 * peak_flops,
        memory_bandwidth=0.8 * hbm,
        memory_bytes=memory_gb * _GB,
        node_link_bandwidth=0.6 * nvlink,
        cross_link_bandwidth=0.8 * 25 * _GB,
        host_bandwidth=0.8 * pcie,
        launch_seconds=50e-6,
    )


def known_hardware() -> dict[str, HardwareSpec]:
    """The table, by name. Data sheets: A100 SXM 80 GB, H100 SXM, H800 SXM (NVLink cut to 400 GB/s), H200 SXM."""
    gpus = (
        _gpu("a100", 312e12, 2039 * _GB, 80, 300 * _GB, 32 * _GB),
        _gpu("h100", 989e12, 3350 * _GB, 80, 450 * _GB, 64 * _GB),
        _gpu("h800", 989e12, 3350 * _GB, 80, 200 * _GB, 64 * _GB),
        _gpu("h200", 989e12, 4800 * _GB, 141, 450 * _GB, 64 * _GB),
    )
    # One core of a laptop or cloud machine running float32 torch; ranks are processes that talk through
    # gloo on the loopback; a layer's floor is the dispatch of its twenty or so operators.
    cpu = HardwareSpec("cpu", 20e9, 8 * _GB, 8 * _GB, 1 * _GB, 1 * _GB, 4 * _GB, 200e-6, devices_per_node=64)
    return {spec.name: spec for spec in (cpu, *gpus)}


def hardware_by_name(name: str, device: str = "auto") -> HardwareSpec:
    """The entry called `name`; `auto` is the cpu, or h100 where `device` is cuda.

    Raises InputError naming the known ones.
    """
    table = known_hardware()
    if name == "auto":
        name = "h100" if device == "cuda" else "cpu"
    if name not in table:
        raise InputError(f"hardware {name!r} is not known; use auto or one of {', '.join(table)}")
    return table[name]
