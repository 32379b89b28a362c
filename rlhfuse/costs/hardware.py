"""The machines that the planner knows by name: data sheets, and how much of them is reached.

A `DataSheet` is what the vendor prints; `DataSheet.reached` is the HardwareSpec that all formulas use.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.base.json_values import from_json, read_json, to_json
from rlhfuse.base.launcher import ranks_per_node
from rlhfuse.config.load import EXAMPLES
from rlhfuse.config.machines import Machines
from rlhfuse.config.spec import CPU, HardwareSpec

_GB = 1e9
MEASURED, MEASURED_KIND, MEASURED_VERSION = "measured:", "hardware", 1
# Plausible ranges of a measured GPU, by field name or its last word: a value outside is a typing error.
PLAUSIBLE = {"flops": (1e10, 1e18), "memory_bytes": (1e8, 1e15), "devices_per_node": (1, 10_000), "share": (0.01, 1)}
PLAUSIBLE |= {"bandwidth": (1e6, 1e16), "bytes": (0, 1e15), "seconds": (0, 10), "tokens": (0, 1e7), "waiting": (1, 1e3)}
# Of a process on a GPU, assumed, as nothing here was measured: a CUDA context with all kernels of torch (800 MB of them
# for one GPU in its own library), cuBLAS and NCCL, which are loaded before they are launched; NCCL's buffers of all
# channels of a group, and of a pair of ranks, which has the four that it is given; in host memory interpreter,
# libraries and page-locked buffers.
CONTEXT_BYTES, COMMUNICATOR_BYTES, CHANNEL_BYTES = 2_000_000_000, 250_000_000, 40_000_000
HOST_PROCESS_BYTES = 3_000_000_000


@dataclass(frozen=True)
class DataSheet:
    """A GPU and its links as printed; bytes/s per direction and device."""

    name: str
    flops: float  # dense bf16
    memory_bandwidth: float
    memory_bytes: float
    node_link: float  # NVLink
    host: float  # PCIe
    switch_sums: bool = True  # by multicast addresses, of Hopper GPUs on
    cross_link: float = 25 * _GB  # a NIC of 200 Gb/s for each device
    devices_per_node: int = 8
    host_memory: float = 2000 * _GB  # of a node, as DGX have it: assumed for any other

    def reached(self) -> HardwareSpec:
        """The rates that formulas use: what software is assumed to reach of these, and floors below which no work gets.

        What large kernels reach follows what public fits of analytic cost models to measured runs find (GEMM 0.5, HBM
        0.8-1.0, NVLink 0.3-0.6). The nine launches of a layer's decode step, which overlap nothing, take 1.5 us each
        when replayed from a captured graph. A collective's step starts up in what NCCL's own cost model counts: 4 us
        over NVLink, 14 us over a network (tuning.cc; protocol Simple). Estimated: Python launches a step that is
        recorded twice, plainly and into the graph, at about 25 us a launch, and a node takes 10 us to instantiate.
        """
        return HardwareSpec(
            name=self.name,
            flops=0.5 * self.flops,
            memory_bandwidth=0.8 * self.memory_bandwidth,
            memory_bytes=self.memory_bytes,
            node_link_bandwidth=0.6 * self.node_link,
            cross_link_bandwidth=0.8 * self.cross_link,
            host_bandwidth=0.8 * self.host,
            launch_seconds=50e-6,
            devices_per_node=self.devices_per_node,
            decode_layer_seconds=9 * 1.5e-6,
            switch_sums=self.switch_sums,
            process_bytes=CONTEXT_BYTES,
            communicator_bytes=COMMUNICATOR_BYTES,
            channel_bytes=CHANNEL_BYTES,
            host_memory_bytes=self.host_memory,
            host_process_bytes=HOST_PROCESS_BYTES,
            collective_seconds=4e-6,
            cross_collective_seconds=14e-6,
            recorded_launch_seconds=60e-6,
            short_sum_seconds=10e-6,
            switch_sum_seconds=5e-6,
        )


def data_sheets() -> dict[str, DataSheet]:
    """By name: A100 SXM 80 GB, H100 SXM, H800 SXM (NVLink cut to 400 GB/s), H200 SXM."""
    sheets = (
        DataSheet("a100", 312e12, 2039 * _GB, 80 * _GB, 300 * _GB, 32 * _GB, switch_sums=False),
        DataSheet("h100", 989e12, 3350 * _GB, 80 * _GB, 450 * _GB, 64 * _GB),
        DataSheet("h800", 989e12, 3350 * _GB, 80 * _GB, 200 * _GB, 64 * _GB),
        DataSheet("h200", 989e12, 4800 * _GB, 141 * _GB, 450 * _GB, 64 * _GB),
    )
    return {sheet.name: sheet for sheet in sheets}


# What torch.cuda.get_device_name says of the devices that the sheets above are about. Cards of the same family with
# other rates or memory (PCIe, NVL, 40 GB) are none of them.
GPU_NAMES = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H800": "h800",
    "NVIDIA H200": "h200",
}


def known_hardware() -> dict[str, HardwareSpec]:
    """The machines by name."""
    # One core of a laptop or cloud machine running float32 torch; ranks are processes that talk through
    # gloo on the loopback. Two ranks on two cores, models of 10 layers of 512: layers over 2048 tokens at 100 to 114
    # GFLOP/s of a core with all that is between the products, decoding at 8.8 GB/s with what it takes to dispatch it.
    # What small models take beside: of models of 3 to 10 layers of 64 to 512, the main thread's CPU time, least of
    # many, on a busy machine. A layer of torch's operators launches in 0.8 to 1.0 ms, its backward in 0.6; one of the
    # engine's kernels in 0.06 to 0.1; a micro-batch is cut, packed and passed on in about 1 ms; between the products
    # 14 KB of a token of 128 take 3.8 us, 49 KB of one of 512 18. A process with torch's CPU build, Megatron and
    # transformers, connected to three others, was measured at 0.675e9 bytes in the quickstart, 0.719e9 where kernels
    # had just been compiled.
    # Gloo between two processes on two cores, medians: an all-reduce of 4 KiB, which is two steps, 133 us, elsewhere
    # 272 us, and 464 us where each has multiplied before; 102 us to send as much there and back; reductions and gathers
    # of a ModelOptimizer 14 ms for 1.2 million parameters, 540 ms for 29 million: each rank sends 0.34 and 0.22 GB/s.
    # Between machines assumed alike.
    cpu = HardwareSpec(
        name="cpu",
        flops=120e9,
        memory_bandwidth=10 * _GB,
        memory_bytes=8 * _GB,
        node_link_bandwidth=1 * _GB,
        cross_link_bandwidth=1 * _GB,
        host_bandwidth=4 * _GB,
        launch_seconds=800e-6,
        devices_per_node=64,
        decode_layer_seconds=80e-6,
        pass_seconds=1e-3,
        moved_share=0.4,
        collective_seconds=200e-6,
        cross_collective_seconds=200e-6,
        gather_share=0.25,
        process_bytes=720_000_000,
    )
    sheets = {name: sheet.reached() for name, sheet in data_sheets().items()}
    return {"cpu": cpu, **sheets, "h100": _measured_h100()}


@lru_cache(maxsize=1)  # every table of layouts asks
def _measured_h100() -> HardwareSpec:
    return load_hardware(next(file for root in EXAMPLES if (file := root / "examples" / "h100.json").exists()))


def save_hardware(path: str | Path, hardware: HardwareSpec) -> None:
    """For `load_hardware`."""
    write_json(path, {"kind": MEASURED_KIND, **to_json(hardware, MEASURED_VERSION)})


def load_hardware(path: str | Path) -> HardwareSpec:
    """A machine that scripts/gpu_check.sh --hardware measured. Raises InputError naming the file and what is wrong."""
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.pop("kind", None) != MEASURED_KIND:
        raise InputError(f"{path} is no measured hardware; give a file that scripts/gpu_check.sh --hardware wrote")
    hardware = from_json(HardwareSpec, raw, str(path), MEASURED_VERSION)
    if hardware.device is CPU or "," in hardware.name or not hardware.source:
        raise InputError(
            f"{path}: name={hardware.name!r}, source={hardware.source!r} are not of a GPU that was measured"
        )
    for field in fields(hardware):
        value, kind = getattr(hardware, field.name), field.name.rpartition("_")[2]
        low, high = PLAUSIBLE.get(field.name, PLAUSIBLE.get(kind, (0, 1)))
        if isinstance(value, (int, float)) and not low <= value <= high:
            raise InputError(f"{path}: {field.name} is {value:g}; no GPU has that, use [{low:g}, {high:g}]")
    return hardware


def at_speed(core: HardwareSpec, cores: float) -> HardwareSpec:
    """A rank that computes with so many cores; with less than one its links, loads and launches wait for it too."""
    part, links = min(1.0, cores), ("node_link_bandwidth", "cross_link_bandwidth", "host_bandwidth")
    starts = "launch_seconds decode_layer_seconds pass_seconds collective_seconds cross_collective_seconds".split()
    changed = {name: cores * getattr(core, name) for name in ("flops", "memory_bandwidth")}
    changed |= {name: part * getattr(core, name) for name in links}
    return replace(core, **changed, **{name: getattr(core, name) / part for name in starts})


def slowed(machine: HardwareSpec, factor: float) -> HardwareSpec:
    """The same machine where all work takes `factor` times as long."""
    if factor == 1:
        return machine
    names = [field.name for field in fields(machine)]
    rates = {name: getattr(machine, name) / factor for name in names if name == "flops" or name.endswith("_bandwidth")}
    starts = {name: getattr(machine, name) * factor for name in names if name.endswith("_seconds")}
    return replace(machine, **rates, **starts)


def hardware_by_name(name: str, device: str = "auto", ranks: int | None = None) -> HardwareSpec:
    """What a task on all ranks of `machines_by_name` can count on. Raises InputError."""
    return machines_by_name(name, device, ranks).whole()


def machines_by_name(name: str, device: str = "auto", ranks: int | None = None) -> Machines:
    """The kind called `name`, or the kinds of a list with counts (a100:8,h100:8) that adds up to so many `ranks`.

    `auto` is the cpu, or h100 where `device` is cuda; `measured:FILE` is what `save_hardware` wrote. A machine has as
    many devices as the launcher has ranks on a node, where there is one. Raises InputError.
    """
    if name.startswith(MEASURED):
        return Machines.of([(_launched(load_hardware(name.removeprefix(MEASURED))), ranks or 1)])
    table = known_hardware()
    if name == "auto":
        name = "h100" if device == "cuda" else "cpu"
    if name in table:
        return Machines.of([(_launched(table[name]), ranks or 1)])
    kinds = []
    for part in name.split(","):
        kind, colon, count = part.strip().partition(":")
        if kind not in table:
            raise InputError(f"hardware {kind!r} is not known; use auto, measured:FILE or one of {', '.join(table)}")
        if not (count.isdecimal() and int(count) > 0):
            raise InputError(f"hardware {name!r}: {part.strip()!r} names no number of ranks; write {kind}:8")
        kinds.append((_launched(table[kind]), int(count)))
    return Machines.of(kinds, ranks)


def _launched(spec: HardwareSpec) -> HardwareSpec:
    ranks = ranks_per_node()
    return replace(spec, devices_per_node=ranks) if ranks else spec
