"""What a call may choose from: every layout of powers of two, with its seconds and bytes (REAL's readings).

Memory as in ReaLHF's Table 2: 16 bytes of each trained parameter stay, not cut over dp; one call at a time has its
weights, cache and activations; frozen weights wait on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paper.calls import WEIGHT_BYTES, CallWork
from placements.mesh import Mesh, aligned_meshes
from placements.problem import Call, MeshProblem, Option

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import HardwareSpec

HELD_BYTES = 16  # of a trained parameter: float32 gradient, weight and two moments
MACHINE_RANKS = 8
LEAST_MESH = MACHINE_RANKS // 2
INFERENCES = ("RewInf", "RefInf", "CriticInf")
PHASES = (("ActorGen",), INFERENCES, ("CriticTrain", "ActorTrain"))
SOURCES = {"ActorGen": "ActorTrain", "CriticInf": "CriticTrain"}


def mesh_problem(works: Mapping[str, CallWork], ranks: int, machine: HardwareSpec) -> MeshProblem:
    """The calls of PHASES by name, on meshes from half a machine up, wherever they begin at a multiple of that."""
    sizes = sorted({mesh.size for mesh in aligned_meshes(ranks, LEAST_MESH).meshes()})
    least = min(sizes)
    meshes = [Mesh(first, size) for size in sizes for first in range(0, ranks - size + 1, least)]

    def call(name: str) -> Call:
        options = {size: call_options(works[name], size, machine) for size in sizes}
        return Call(name, {mesh: options[mesh.size] for mesh in meshes}, SOURCES.get(name, ""))

    phases = tuple(tuple(map(call, phase)) for phase in PHASES)
    return MeshProblem((machine.memory_bytes,) * ranks, least, phases)


def power_layouts(size: int, machine: HardwareSpec) -> Iterator[ParallelLayout]:
    """All layouts of powers of two on so many ranks, tensor ranks within a machine."""
    degrees = [1 << bit for bit in range(size.bit_length())]
    for tp in (tp for tp in degrees if tp <= machine.devices_per_node):
        for pp in (pp for pp in degrees if tp * pp <= size):
            yield ParallelLayout(size // (tp * pp), tp, pp)


def call_options(work: CallWork, size: int, machine: HardwareSpec) -> tuple[Option, ...]:
    """All layouts on so many ranks that cut the model, and the batch into whole samples."""
    found = []
    for layout in power_layouts(size, machine):
        try:
            work.spec.check_layout(layout, work.name)
        except InputError:
            continue
        sequences = work.microbatch_sequences(layout)
        if sequences >= 1 and sequences.is_integer():
            found.append(_option(work, layout, sequences, machine))
    return tuple(found)


def _option(work: CallWork, layout: ParallelLayout, sequences: float, machine: HardwareSpec) -> Option:
    call = work.on(layout, machine)
    cost, seconds, tokens = call.model, work.seconds(call), sequences * work.sample_tokens
    parameters = cost.memory.parameters()
    weights, layers = WEIGHT_BYTES * parameters, max(map(len, layout.stage_layers(work.spec.layers)))
    if work.trains:
        kept = layout.pp * layers * cost.memory.kept_layer_bytes(tokens)  # no fewer micro-batches than stages
        return Option(layout, seconds, HELD_BYTES * parameters, weights + kept + cost.memory.passing_bytes(tokens))
    if work.name.endswith("Gen"):
        cache = layout.pp * tokens * cost.memory.kv_bytes_per_token() * layers / work.spec.layers
        passing = weights + cache + cost.memory.prefilling_bytes(sequences * work.prompt_tokens, sequences)
    else:
        passing = weights + cost.memory.scoring_bytes(tokens)
    return Option(layout, seconds, 0.0, passing, call.weights_seconds() if work.name in SOURCES else 0.0)
