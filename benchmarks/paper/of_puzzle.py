"""PUZZLE's figures: time-sharing exactly, layouts and moves by a cost model of its two clusters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import mean

from paper.calls import ModelCall
from paper.llamas import llama
from paper.page import Content, Results, Row, claim_row, value_row
from paper.space import power_layouts

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.hardware import ASSUMED, data_sheets
from rlhfuse.costs.layout_moves import model_load
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.ir.ranks import plain_cells
from rlhfuse.schedule.rules.builders import serial_1f1b, serial_makespan
from rlhfuse.schedule.rules.time_sharing import time_sharing

PROMPT = OUTPUT = 256
BATCH = 64  # of Figure 3
CONFIGURATIONS = {  # Table 2: batch and GPUs of an actor and a critic
    ("7B", "350M"): (128, 8),
    ("7B", "7B"): (256, 16),
    ("13B", "350M"): (256, 16),
    ("13B", "7B"): (256, 16),
    ("33B deep", "7B"): (128, 32),
}
CLUSTERS = ("orion", "phoenix")


def cluster(name: str) -> HardwareSpec:
    """orion: A100 80 GB on PCIe 4; phoenix: SXM, its NVLink at the data sheet's rate; both 100 Gb/s a machine."""
    sheet = replace(data_sheets()["a100"], cross_link=12.5e9 / 8)
    if name == "orion":
        sheet = replace(sheet, name="a100-pcie", memory_bandwidth=1935e9, node_link=31.5e9, host=31.5e9)
    return ASSUMED.reached(sheet)


def time_shared(_: Results) -> Content:
    """Equation (1) and Figure 5."""
    rows = []
    for nodes, microbatches in ((4, 4), (16, 14), (16, 16)):
        shared = two_models(nodes, microbatches)
        ours = float(serial_makespan(shared)) / float(evaluate(time_sharing(shared)).makespan)
        printed = (microbatches + nodes - 1) * 4 / (microbatches * 4 + (nodes - 1) * 2)
        what = f"speed-up of two equal models, {nodes} stages, {microbatches} micro-batches"
        rows.append(value_row(what, "PUZZLE, equation (1)", printed, ours, ".3f"))
    for name, rule, slot in (("time-shared", time_sharing, 9), ("serial", serial_1f1b, 15)):
        schedule = rule(two_models(4, 4))
        first = schedule.orders[0].index(Action("second", 0, Kind.F, 0))
        start = float(evaluate(schedule).starts[0][first])
        what = f"first forward of the second model on device 1, {name}: slot"
        rows.append(value_row(what, "PUZZLE, Figure 5", slot, start + 1, "g"))
    return Content(rows)


def two_models(nodes: int, microbatches: int) -> FusionProblem:
    times = (1,) * nodes, (1,) * nodes, (1,) * nodes
    names = ("first", "second")
    return FusionProblem(nodes, tuple(Pipeline(n, n, tuple(range(nodes)), microbatches, *times) for n in names))


def layouts(_: Results) -> Content:
    """Figure 3 (a)."""
    rows, tables = [], []
    for name, link in zip(CLUSTERS, ("PCIe", "NVLink")):
        machine, parts = cluster(name), {"generation": {}, "training": {}}
        for layout in (ParallelLayout(1, tp, 8 // tp) for tp in (1, 2, 4, 8)):
            pair = f"({layout.pp}, {layout.tp})"
            parts["generation"][pair] = generation_seconds("7B", layout, BATCH, machine)
            parts["training"][pair] = training_seconds("7B", layout, BATCH, machine)
        cells = [[pair, *(f"{BATCH / one[pair]:.2f}" for one in parts.values())] for pair in parts["training"]]
        tables.append((f"samples per second by (P, T), {name}", ("(P, T)", "generation", "training"), cells))
        for (kind, seconds), printed in zip(parts.items(), ("(8, 1)", "(4, 2)")):
            what, best = f"fastest (P, T) of {kind}, {link}", min(seconds, key=seconds.__getitem__)
            if name == "orion":
                rows.append(claim_row(what, "PUZZLE, Figure 3 (a)", printed, best, best == printed))
            else:
                rows.append(Row(what, "PUZZLE", "", best))
    return Content(rows, tables)


def generation_seconds(name: str, layout: ParallelLayout, batch: int, machine: HardwareSpec) -> float:
    return ModelCall(AnalyticCost(llama(name), layout, machine, 2)).generate_seconds(batch, PROMPT, OUTPUT)


def training_seconds(
    name: str, layout: ParallelLayout, batch: int, machine: HardwareSpec, critic: bool = False
) -> float:
    """With the fastest number of micro-batches."""
    call, samples = ModelCall(AnalyticCost(llama(name), layout, machine, 2, scalar_head=critic)), batch // layout.dp
    counts = [1 << bit for bit in range(samples.bit_length()) if samples % (1 << bit) == 0]
    return min(call.train_seconds(batch, PROMPT + OUTPUT, 1, count) for count in counts)


def switches(_: Results) -> Content:
    """Table 3."""
    rows, spec, source = [], llama("33B deep"), ParallelLayout(1, 1, 32)
    for name, target, printed in (
        ("orion", ParallelLayout(1, 2, 16), 0.49),
        ("phoenix", ParallelLayout(1, 4, 8), 0.48),
    ):
        machine = cluster(name)
        load = model_load(spec, source, plain_cells(source), target, 2, machine.devices_per_node)
        seconds = load.seconds(machine)
        what = f"33B from (32, 1, 1) to ({target.pp}, {target.dp}, {target.tp}), {name}"
        ends = f"{printed} s", f"{seconds:.2f} s", f"{seconds / printed - 1:+.0%}"
        rows.append(Row(what, "PUZZLE, Table 3", *ends))
    return Content(rows)


def similar_plans(_: Results) -> Content:
    """Figure 11: own layouts for generation and training against one layout for both."""
    gains = [
        one_layout_costs(actor, critic, *sizes, cluster(name))
        for name in CLUSTERS
        for (actor, critic), sizes in CONFIGURATIONS.items()
    ]
    rows = []
    for kind, printed in (("generation", 1.22), ("training", 1.34)):
        each = [gain[kind] for gain in gains]
        what = f"speed-up over the {kind}-optimal layout for both, mean of ten"
        row = value_row(what, "PUZZLE, Figure 11", printed, mean(each))
        rows.append(replace(row, ours=f"{row.ours} ({min(each):.2f}-{max(each):.2f})"))
    return Content(rows)


def one_layout_costs(actor: str, critic: str, batch: int, gpus: int, machine: HardwareSpec) -> dict[str, float]:
    """How much longer one layout for generation and training takes, that is best for the one or for the other."""
    usable = [one for one in power_layouts(gpus, machine) if batch % one.dp == 0]
    usable = list(cutting(llama(actor), usable))
    generate = {layout: generation_seconds(actor, layout, batch, machine) for layout in usable}
    train = {layout: training_seconds(actor, layout, batch, machine) for layout in usable}
    critics = cutting(llama(critic), usable)
    other = min(training_seconds(critic, layout, batch, machine, critic=True) for layout in critics)
    apart = min(
        generate[one] + train[two] + moving_seconds(actor, two, one, machine) for one in usable for two in usable
    )
    best = {"generation": min(generate, key=generate.__getitem__), "training": min(train, key=train.__getitem__)}
    return {kind: (generate[one] + train[one] + other) / (apart + other) for kind, one in best.items()}


def cutting(spec: ModelSpec, some: Iterable[ParallelLayout]) -> Iterable[ParallelLayout]:
    """Those that cut heads and layers."""
    return (one for one in some if one.pp <= spec.layers and spec.heads % one.tp == 0)


def moving_seconds(name: str, source: ParallelLayout, target: ParallelLayout, machine: HardwareSpec) -> float:
    """What each rank receives over the slowest link that it needs; nothing where the layout stays."""
    return 0.0 if source == target else ModelCall(AnalyticCost(llama(name), target, machine, 2)).weights_seconds()


SECTIONS = {
    "puzzle-1": time_shared,
    "puzzle-3": layouts,
    "puzzle-table3": switches,
    "puzzle-11": similar_plans,
}
