"""The figures of a call beside the data sheet's limit and beside the planner's price; the machine that they measure.

The constants that the planner assumes are replaced by those with which its own formulas give what was measured, each
from the figure that tells most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpu_checks.figures import Figure
from gpu_checks.speed import ELEMENT, spec_of
from text_table import aligned

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.analytic_table import analytic_table
from rlhfuse.costs.forms.collectives import RankGroup, send_seconds
from rlhfuse.costs.forms.training import MicrobatchTokens
from rlhfuse.costs.hardware import GPU_NAMES, DataSheet, data_sheets
from rlhfuse.costs.kernels import Kernels

STAGES = 3


def cost_of(hardware: HardwareSpec, size: str, layout: str = "d1t1p1", **changes: Any) -> AnalyticCost:
    """As a plan prices a model of this shape on GPUs."""
    spec = spec_of(size, **changes)
    return AnalyticCost(spec, ParallelLayout.parse(layout), hardware, ELEMENT, kernels=Kernels())


def _layers(hardware: HardwareSpec, size: str, layers: int, tokens: int, sequences: int) -> tuple[float, float]:
    forward, backward = cost_of(hardware, size).stage_seconds(MicrobatchTokens(tokens, sequences, 0)).layer
    return layers * forward, layers * backward


def _step_sum(hardware: HardwareSpec, ranks: int, rows: int, switch: bool) -> float:
    cost = cost_of(hardware, "8b", f"d1t{ranks}p1")
    return replace(cost, kernels=Kernels(switch_sums=switch)).decode_all_reduce_seconds(rows) / 2


# What a figure's `price` names: the planner's seconds on a machine, by its own formulas.
PRICES: dict[str, Callable[..., float]] = {
    "read": lambda machine, size: size / machine.memory_bandwidth,
    "multiply": lambda machine, flops: flops / machine.flops,
    "load": lambda machine, size: size / machine.host_bandwidth,
    "launches": lambda machine, layers: layers * machine.launch_seconds,
    "backward launches": lambda machine, layers: layers * machine.backward_launch_seconds,
    "decode": lambda machine, size, batch, tokens: cost_of(machine, size).decode_step_seconds(batch, tokens),
    "prefill": lambda machine, size, count, length: cost_of(machine, size).prefill_seconds(count * length, count),
    "capture": lambda machine, size: cost_of(machine, size).capture_seconds(),
    "forward": lambda machine, *micro: _layers(machine, *micro)[0],
    "training": lambda machine, *micro: sum(_layers(machine, *micro)),
    "in a row": lambda machine, size, layers, *micro: max(  # of many: the device, or the host that launches ahead
        sum(_layers(machine, size, layers, *micro)), *cost_of(machine, size, num_hidden_layers=layers).host_seconds
    ),
    "head": lambda machine, size, tokens: sum(
        cost_of(machine, size).stage_seconds(MicrobatchTokens(tokens, 1, tokens)).ends[-1]
    ),
    "optimizer": lambda machine, size, layers: cost_of(
        machine, size, f"d1t1p{STAGES}", num_hidden_layers=STAGES * layers
    ).optimizer_step_seconds(1),
    "send": lambda machine, size: send_seconds(machine, size, across=False),
    "all_reduce": lambda machine, ranks, size: RankGroup(machine, ranks).all_reduce_seconds(size),
    "gather": lambda machine, ranks, size: RankGroup(machine, ranks).gather_seconds(size),
    "step_sum": _step_sum,
    "migration": lambda machine, size: analytic_table(cost_of(machine, "8b")).migration_seconds(size),
}
# A constant of HardwareSpec, and the figure that it follows from.
FOLLOWS = (
    ("memory_bandwidth", "decode 8b 192 x 1000"),
    ("decode_layer_seconds", "decode 8b 1 x 144"),
    ("decode_share", "decode 8b 256 x 144"),
    ("prefill_launch_seconds", "prefill 8b 1 x 16"),
    ("flops", "stage 8192"),
    ("launch_seconds", "launches 500"),
    ("backward_launch_seconds", "backward launches 500"),
    ("half_rate_tokens", "stage 2048"),
    ("host_bandwidth", "weights to the device"),
    ("recorded_launch_seconds", "capture 8b"),
    ("node_link_bandwidth", "all-reduce large"),
    ("collective_seconds", "all-reduce small"),
    ("short_sum_seconds", "recorded sum"),
    ("switch_sum_seconds", "switch sum"),
)
MOST = {"half_rate_tokens": 8192.0}  # the most that constants may be which are no rates; 1 where none is named
DEVICE = ("forward", "training")  # prices of the device alone, which waits for no launch
ROUNDS, HALVINGS = 48, 60  # over all constants, as each changes others' prices; of one constant's interval


def figures_of(checks: Iterable[Mapping[str, Any]]) -> dict[str, Figure]:
    """By name, of the results of a report."""
    found = (
        check["detail"].get("figures", ()) for check in checks if check["ok"] and isinstance(check["detail"], dict)
    )
    made = [Figure(**{**one, "price": tuple(one["price"])}) for several in found for one in several]
    return {figure.name: figure for figure in made}


def machine_of(environment: Mapping[str, Any]) -> tuple[DataSheet, HardwareSpec]:
    """The data sheet of a GPU, and what the planner assumes of it. Of one without, those of the GPU that `auto` plans
    for, with its own name and memory."""
    name = environment.get("name", "")
    sheet = data_sheets()[GPU_NAMES.get(name, "h100")]
    if name not in GPU_NAMES:
        sums = environment.get("capability", 0) >= 9
        memory = float(environment.get("memory_bytes", sheet.memory_bytes))
        sheet = replace(sheet, name=name.replace(",", " ") or "GPU", memory_bytes=memory, switch_sums=sums)
    return sheet, sheet.reached()


def limit_seconds(figure: Figure, sheet: DataSheet) -> float:
    """No machine of the data sheet takes less."""
    rate = {"memory": sheet.memory_bandwidth, "node_link": sheet.node_link, "host": sheet.host}[figure.over]
    return max(figure.bytes / rate, figure.flops / sheet.flops)


def price_seconds(figure: Figure, machine: HardwareSpec) -> float:
    kind, *arguments = figure.price
    return PRICES[kind](machine, *arguments)


def measured_seconds(figure: Figure) -> float | None:
    """What its price is about; None where the report has no seconds of the device."""
    return figure.device_seconds if figure.price[0] in DEVICE else figure.seconds


def unfit(figures: Mapping[str, Figure]) -> list[str]:
    """For people: what is not fitted, for an older report lacks what it follows from."""
    missing = [(constant, name) for constant, name in FOLLOWS if name in figures]
    missing = [(constant, name) for constant, name in missing if measured_seconds(figures[name]) is None]
    return [f"{constant} stays as assumed: {name} has no device_seconds here" for constant, name in missing]


def fit_machine(figures: Mapping[str, Figure], sheet: DataSheet, assumed: HardwareSpec, source: str) -> HardwareSpec:
    """The machine on which the planner's prices are the measured seconds; rates end at the data sheet's."""
    most = {
        "flops": sheet.flops,
        "memory_bandwidth": sheet.memory_bandwidth,
        "host_bandwidth": sheet.host,
        "node_link_bandwidth": sheet.node_link,
        "decode_share": 1.0,
    }
    machine, measured = assumed, []
    for _ in range(ROUNDS):
        measured.clear()
        for constant, name in FOLLOWS:
            if (figure := figures.get(name)) and (seconds := measured_seconds(figure)) is not None:
                figure = replace(figure, seconds=seconds)
                ends = (most[constant] / 1e4, most[constant]) if constant in most else (0.0, MOST.get(constant, 1.0))
                slow, fast = (price_seconds(figure, replace(machine, **{constant: end})) for end in ends)
                if slow != fast:  # else it has no part in this price
                    machine = replace(machine, **{constant: _solve(figure, machine, constant, ends, slow < fast)})
                    measured.append(constant)
    rounded = {name: float(f"{getattr(machine, name):.7g}") for name in measured}
    return replace(machine, **rounded, source=source, measured=tuple(measured))


def _solve(figure: Figure, machine: HardwareSpec, constant: str, ends: tuple[float, float], grows: bool) -> float:
    """The value between `ends` at which the price is the figure's seconds, or the nearer end."""
    low, high = ends
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = price_seconds(figure, replace(machine, **{constant: middle})) > figure.seconds
        low, high = (low, middle) if above == grows else (middle, high)
    return low if grows else high


def table(figures: Iterable[Figure], sheet: DataSheet, machines: Sequence[HardwareSpec]) -> list[str]:
    """Lines for people: a figure, its limit, its share of it, host and device alone, and its price on each machine."""
    heads = ["", "measured", "limit", "of it", "host", "device", *("assumed", "fitted")[: len(machines)]]
    rows = [heads]
    for figure in figures:
        limit = limit_seconds(figure, sheet)
        rows.append(
            [
                figure.name,
                readable(figure.seconds),
                readable(limit) if limit else "",
                f"{limit / figure.seconds:.0%}" if limit else "",
                *(readable(one) if one else "" for one in (figure.host_seconds, figure.device_seconds)),
                *(readable(price_seconds(figure, machine)) for machine in machines),
            ]
        )
    return aligned(rows, left=(0,))


def readable(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
