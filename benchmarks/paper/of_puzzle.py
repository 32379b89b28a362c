"""PUZZLE's figures: time-sharing exactly, layouts and moves by a cost model of its two clusters."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

from paper.page import Row, Section, claim_row, value_row
from real.calls import ModelCall

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.hardware import ASSUMED, DataSheet, data_sheets
from rlhfuse.costs.layout_moves import model_load
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.ir.ranks import plain_cells
from rlhfuse.schedule.rules.builders import serial_1f1b, serial_makespan
from rlhfuse.schedule.rules.time_sharing import time_sharing

PAPER = "PUZZLE"
PROMPT = OUTPUT = 256
BATCH = 64  # of Figure 3
MODELS = {  # Table 1; heads, which it does not print, as LLaMA has them
    "350M": (16, 512, 8, 11008),
    "7B": (32, 4096, 32, 11008),
    "13B": (40, 5120, 40, 13824),
    "33B": (64, 6656, 52, 17920),
}
CONFIGURATIONS = {  # Table 2: batch and GPUs of an actor and a critic
    ("7B", "350M"): (128, 8),
    ("7B", "7B"): (256, 16),
    ("13B", "350M"): (256, 16),
    ("13B", "7B"): (256, 16),
    ("33B", "7B"): (128, 32),
}
CLUSTERS = ("orion", "phoenix")


def sections() -> list[Section]:
    return [time_shared(), layouts(), switches(), similar_plans()]


def spec(name: str) -> ModelSpec:
    layers, hidden, heads, mlp = MODELS[name]
    return ModelSpec("llama", layers, hidden, heads, heads, hidden // heads, mlp, 32000, 4096)


def cluster(name: str) -> HardwareSpec:
    """orion: A100 80 GB on PCIe 4; phoenix: SXM, its NVLink at the data sheet's rate; both 100 Gb/s a machine."""
    sheet: DataSheet = replace(data_sheets()["a100"], cross_link=12.5e9 / 8)
    if name == "orion":
        sheet = replace(sheet, name="a100-pcie", memory_bandwidth=1935e9, node_link=31.5e9, host=31.5e9)
    return ASSUMED.reached(sheet)


def time_shared() -> Section:
    """Equation (1) and Figure 5."""
    rows = []
    for nodes, microbatches in ((4, 4), (16, 14), (16, 16)):
        shared = two_models(nodes, microbatches)
        ours = float(serial_makespan(shared)) / float(evaluate(time_sharing(shared)).makespan)
        work = 2 * (1 + 1)
        printed = (microbatches + nodes - 1) * work / (microbatches * work + (nodes - 1) * 2)
        what = f"speed-up of two equal models, {nodes} stages, {microbatches} micro-batches"
        rows.append(value_row(what, f"{PAPER}, equation (1)", printed, ours, ".3f"))
    for name, schedule, slot in (("time-shared", time_sharing, 9), ("serial", serial_1f1b, 15)):
        timeline = evaluate(schedule(two_models(4, 4)))
        first = schedule(two_models(4, 4)).orders[0].index(Action("second", 0, Kind.F, 0))
        what = f"first forward of the second model on device 1, {name}: slot"
        rows.append(value_row(what, f"{PAPER}, Figure 5", slot, float(timeline.starts[0][first]) + 1, "g"))
    text = [
        "The makespan of the schedule that this project builds by the paper's rule, not the formula put into itself."
    ]
    return Section("puzzle-1", f"{PAPER}, equation (1), Figure 5: time-sharing", "computed with this page", text, rows)


def two_models(nodes: int, microbatches: int) -> FusionProblem:
    times = (1,) * nodes, (1,) * nodes, (1,) * nodes
    names = ("first", "second")
    return FusionProblem(nodes, tuple(Pipeline(n, n, tuple(range(nodes)), microbatches, *times) for n in names))


def layouts() -> Section:
    """Figure 3 (a)."""
    printed = {"generation": "(8, 1)", "training": "(4, 2)"}
    rows, tables = [], []
    for name in CLUSTERS:
        machine, cells = cluster(name), []
        seconds: dict[str, dict[str, float]] = {"generation": {}, "training": {}}
        for tp in (1, 2, 4, 8):
            layout = ParallelLayout(1, tp, 8 // tp)
            pair = f"({layout.pp}, {layout.tp})"
            seconds["generation"][pair] = generation_seconds("7B", layout, BATCH, machine)
            seconds["training"][pair] = training_seconds("7B", layout, BATCH, machine)
            cells.append([pair, *(f"{BATCH / parts[pair]:.2f}" for parts in seconds.values())])
        tables.append((f"samples per second by (P, T), {name}", ("(P, T)", "generation", "training"), cells))
        for what, parts in seconds.items():
            best = min(parts, key=lambda pair: parts[pair])
            source = f"{PAPER}, Figure 3 (a)" if name == "orion" else PAPER
            if name == "orion":
                rows.append(
                    claim_row(f"fastest (P, T) of {what}, PCIe", source, printed[what], best, best == printed[what])
                )
            else:
                rows.append(Row(f"fastest (P, T) of {what}, NVLink", source, "", best))
    text = [
        "LLaMA-7B, 8 A100 and batch 64 are stated, lengths are taken from section 7 (256 + 256). A trend only: the "
        "paper's generation is its own engine's, ours a cost model with constants that nothing was fitted to.",
    ]
    return Section("puzzle-3", f"{PAPER}, Figure 3: layouts", "computed with this page", text, rows, tables)


def generation_seconds(name: str, layout: ParallelLayout, batch: int, machine: HardwareSpec) -> float:
    return ModelCall(AnalyticCost(spec(name), layout, machine, 2)).generate_seconds(batch, PROMPT, OUTPUT)


def training_seconds(
    name: str, layout: ParallelLayout, batch: int, machine: HardwareSpec, critic: bool = False
) -> float:
    """With the fastest number of micro-batches."""
    call, samples = ModelCall(AnalyticCost(spec(name), layout, machine, 2, scalar_head=critic)), batch // layout.dp
    counts = [1 << bit for bit in range(samples.bit_length()) if samples % (1 << bit) == 0]
    return min(call.train_seconds(batch, PROMPT + OUTPUT, 1, count) for count in counts)


def switches() -> Section:
    """Table 3."""
    rows = []
    for name, target, printed in (
        ("orion", ParallelLayout(1, 2, 16), 0.49),
        ("phoenix", ParallelLayout(1, 4, 8), 0.48),
    ):
        seconds = switch_seconds("33B", ParallelLayout(1, 1, 32), target, cluster(name))
        what = f"33B from (32, 1, 1) to ({target.pp}, {target.dp}, {target.tp}), {name}"
        rows.append(Row(what, f"{PAPER}, Table 3", f"{printed} s", f"{seconds:.2f} s", f"{seconds / printed - 1:+.0%}"))
    text = [
        "Bytes over links as this project would route them. The printed seconds are far more than the bytes need: they "
        "hold what the paper's system does besides, so nothing is claimed. Layouts of the other configurations are not "
        "printed.",
    ]
    return Section("puzzle-table3", f"{PAPER}, Table 3: switching layouts", "computed with this page", text, rows)


def switch_seconds(name: str, source: ParallelLayout, target: ParallelLayout, machine: HardwareSpec) -> float:
    """Weights of a model in bf16 from one layout to another on the same ranks."""
    load = model_load(spec(name), source, plain_cells(source), target, 2, machine.devices_per_node)
    return load.seconds(machine)


def similar_plans() -> Section:
    """Figure 11: own layouts for generation and training against one layout for both."""
    rows = []
    for kind, printed in (("generation", 1.22), ("training", 1.34)):
        gains = {
            f"{actor}/{critic} {name}": one_layout_costs(actor, critic, *sizes, cluster(name))[kind]
            for name in CLUSTERS
            for (actor, critic), sizes in CONFIGURATIONS.items()
        }
        what = f"speed-up over the {kind}-optimal layout for both, mean of ten"
        row = value_row(what, f"{PAPER}, Figure 11", printed, mean(gains.values()))
        rows.append(replace(row, ours=f"{row.ours} ({min(gains.values()):.2f}-{max(gains.values()):.2f})"))
    text = [
        "Seconds of generation, of both trainings and of moving the actor's weights, for every layout of powers of two "
        "on all GPUs: T_i + T_j + T_ij. Scoring is left out. A trend only: 256 + 256 tokens are stated, micro-batches "
        "and memory are not, so that ours may choose what their system could not run.",
    ]
    return Section("puzzle-11", f"{PAPER}, Figure 11: own layouts", "computed with this page", text, rows)


def one_layout_costs(actor: str, critic: str, batch: int, gpus: int, machine: HardwareSpec) -> dict[str, float]:
    """How much longer one layout for generation and training takes, that is best for the one or for the other."""
    degrees = [1 << bit for bit in range(gpus.bit_length())]
    usable = [
        ParallelLayout(gpus // (tp * pp), tp, pp)
        for tp in degrees
        for pp in degrees
        if tp * pp <= gpus and tp <= machine.devices_per_node and pp <= MODELS[actor][0]
        if MODELS[actor][2] % tp == 0 and batch % (gpus // (tp * pp)) == 0
    ]
    generate = {layout: generation_seconds(actor, layout, batch, machine) for layout in usable}
    train = {layout: training_seconds(actor, layout, batch, machine) for layout in usable}
    critics = [one for one in usable if one.pp <= MODELS[critic][0] and MODELS[critic][2] % one.tp == 0]
    other = min(training_seconds(critic, layout, batch, machine, critic=True) for layout in critics)
    best = {"generation": min(generate, key=generate.__getitem__), "training": min(train, key=train.__getitem__)}
    apart = min(
        generate[one] + train[two] + moving_seconds(actor, two, one, machine) for one in usable for two in usable
    )
    return {kind: (generate[one] + train[one] + other) / (apart + other) for kind, one in best.items()}


def moving_seconds(name: str, source: ParallelLayout, target: ParallelLayout, machine: HardwareSpec) -> float:
    """What each rank receives over the slowest link that it needs; nothing where the layout stays."""
    return 0.0 if source == target else ModelCall(AnalyticCost(spec(name), target, machine, 2)).weights_seconds()
