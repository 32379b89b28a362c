"""What ranks send each other in an iteration and what it is for, within machines and across: rows of the plan.

Collectives go round a ring of their group's ranks. Left out is what every run has and no layout changes (samples with
their scores, norms, what is asked of the job's store), and of tensor ranks all but layers' sums: embeddings, output
layers and guesses, where a group of two crossed machines, were 28 to 41% more at a hidden size of 128.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.costs.layout_moves import LayoutMove
from rlhfuse.decisions.shards import Cells
from rlhfuse.planning.candidate import Candidate
from rlhfuse.schedule.ir.ranks import neighbour_pairs, plain_cells
from rlhfuse.simulator.simulation import Simulation
from rlhfuse.tasks.task import ModelTask

Sent = Iterator[tuple[int, int, float]]  # sender, receiver, bytes


@dataclass(frozen=True)
class TrafficRow:
    """Bytes that all ranks together send in an iteration for one purpose, to ranks of their machine and of others."""

    purpose: str
    within: int
    across: int

    @staticmethod
    def of(purpose: str, sent: Iterable[tuple[int, int, float]], ranks_per_node: int) -> TrafficRow:
        sums = [0.0, 0.0]
        for sender, receiver, size in sent:
            if sender != receiver:
                sums[sender // ranks_per_node != receiver // ranks_per_node] += size
        return TrafficRow(purpose, *map(round, sums))


def traffic(draft: Candidate, moves: Sequence[LayoutMove], threshold: int) -> tuple[TrafficRow, ...]:
    """All that is sent, with its `moves` of weights and the migration at `threshold` (R_t); no row of nothing."""
    node = draft.inputs.hardware.devices_per_node
    rows = [TrafficRow(f"weights of the {m.model}", m.traffic.within, m.traffic.across) for m in moves]
    rows.append(TrafficRow.of("keys and values that migrate", _migration(draft, threshold), node))
    for task in draft.tasks:
        cells = draft.ranks.pipelines(task.role) if task.training else plain_cells(task.layout)
        sums = _tensor_sums(draft, task, cells)
        rows.append(TrafficRow.of(f"{task.name}: sums over tensor ranks", sums, node))
        if task.training:
            rows += [TrafficRow.of(f"{task.name}: {what}", sent, node) for what, sent in _training(draft, task, cells)]
    return tuple(row for row in rows if row.within or row.across)


def traffic_lines(rows: Sequence[TrafficRow]) -> tuple[str, ...]:
    """A table for people, with its sums."""
    total = TrafficRow("together", sum(row.within for row in rows), sum(row.across for row in rows))
    lines = [f"{'':49s}{'in a node':>13s}{'across':>13s}"]
    for row in (*rows, total):
        lines.append(f"{row.purpose:49s}{readable_bytes(row.within):>13s}{readable_bytes(row.across):>13s}")
    return tuple(lines)


def ring(ranks: Sequence[int], whole_bytes: float) -> Sent:
    """An all-gather or reduce-scatter of a message of `whole_bytes`; an all-reduce is both, one after the other."""
    for place, rank in enumerate(ranks):
        yield rank, ranks[(place + 1) % len(ranks)], whole_bytes * (len(ranks) - 1) / len(ranks)


def _training(draft: Candidate, task: ModelTask, cells: Cells) -> Iterator[tuple[str, Sent]]:
    """Optimizer steps and pipelines of one model; `cells`: of its pipelines."""
    cost, config, steps = draft.analytic[task.name], draft.run.config, draft.batch.optimizer_steps
    groups, memory, layout = draft.ranks.dp_groups(task.role), cost.memory, task.layout
    zero = getattr(config, task.role).optim.name == "adam"
    passes = 1 if zero and not cost.hardware.device.scatters_wholly else 2

    def round_replicas(bytes_at) -> Sent:
        for place, tensor_ranks in enumerate(groups):
            for ranks in tensor_ranks:
                yield from ring(ranks, steps * bytes_at(place))

    def ends() -> Sent:
        whole = steps * 4 * cost.spec.padded_vocab * cost.spec.hidden / layout.tp
        for pipeline in cells if task.role in draft.run.tied and layout.pp > 1 else ():
            for pair in zip(pipeline[0], pipeline[-1]):
                yield from ring(pair, 2 * whole)

    yield "gradients summed over replicas", round_replicas(lambda place: passes * memory.gradient_bytes(place))
    if zero:
        yield "weights gathered from replicas", round_replicas(memory.weights_bytes)
    yield "gradients of tied embeddings", ends()
    size = memory.hidden_bytes(_trained_tokens(draft) / layout.dp)
    yield "hidden states and their gradients", ((*pair, size) for pair in neighbour_pairs(cells, layout))


def _tensor_sums(draft: Candidate, task: ModelTask, cells: Cells) -> Sent:
    """Two sums a layer of a forward, and as many of a backward and of layers that run again."""
    cost, layout, places = draft.analytic[task.name], task.layout, [0] * task.layout.pp
    tokens = _trained_tokens(draft) if task.training else draft.inputs.drawn.tokens
    passes = (2 + (cost.recompute == "full")) if task.training else 1
    for stage, layers in enumerate(layout.stage_layers(cost.spec.layers)):
        places[stage % layout.pp] += len(layers)
    message = tokens / layout.dp * cost.spec.hidden * cost.element_bytes
    for pipeline in cells:
        for layers, cell in zip(places, pipeline):
            yield from ring(cell, 2 * passes * layers * 2 * message)


def _migration(draft: Candidate, threshold: int) -> Sent:
    """The cache of the samples that move in the first batch that was drawn."""
    batch, limits = draft.batch, draft.generation.limits
    if not threshold or batch.instances == 1:
        return
    layout = next(task.layout for task in draft.tasks if task.name == "generation")
    cells = plain_cells(layout)
    _, state, _ = Simulation(draft.inputs.drawn.batches[:1], batch.instances, draft.costs, limits).trace(threshold)
    for sample in state.samples[state.samples["kv_tokens"] > 0]:
        size = sample["kv_tokens"] * limits.kv_bytes_per_token / layout.tp
        for source, target in zip(cells[sample["home"]][0], cells[sample["at"]][0]):
            yield source, target, size


def _trained_tokens(draft: Candidate) -> float:
    return draft.batch.epochs * draft.inputs.drawn.trained_tokens
