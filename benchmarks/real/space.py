"""What a call may choose from: every layout of powers of two, with its seconds and bytes (REAL's readings).

Memory as in ReaLHF's Table 2: 16 bytes of each trained parameter stay, not cut over dp; one call at a time has its
weights, cache and activations; frozen weights wait on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from placements.mesh import meshes_anywhere
from placements.problem import Call, MeshProblem, Option, on_equal_meshes
from real.calls import ModelCall
from real.tables import MINIBATCHES, OUTPUT_TOKENS, PROMPT_TOKENS, RealRow

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.kernels import Kernels

HELD_BYTES, WEIGHT_BYTES = 16, 2  # of a trained parameter: float32 gradient, weight and two moments; bfloat16 weight
INFERENCES = ("RewInf", "RefInf", "CriticInf")
PHASES = (("ActorGen",), INFERENCES, ("CriticTrain", "ActorTrain"))
SOURCES = {"ActorGen": "ActorTrain", "CriticInf": "CriticTrain"}


@dataclass(frozen=True)
class CallWork:
    """A call of REAL's graph without a layout; `name` ends with Gen, Inf or Train.

    `microbatches` are passes of generation and inference, and of training multiply 2 x PP.
    """

    name: str
    spec: ModelSpec
    batch: int
    prompt_tokens: int
    output_tokens: int
    minibatches: int
    microbatches: int

    @staticmethod
    def of(row: RealRow) -> CallWork:
        return CallWork(row.call, row.spec, row.batch, PROMPT_TOKENS, OUTPUT_TOKENS, MINIBATCHES, row.microbatches)

    @property
    def trains(self) -> bool:
        return self.name.endswith("Train")

    @property
    def sample_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def on(self, layout: ParallelLayout, machine: HardwareSpec, kernels: Kernels | None = None) -> ModelCall:
        """In bf16; training recomputes. `kernels`: those of this project between the products."""
        head = self.name.startswith(("Rew", "Critic"))
        cost = AnalyticCost(self.spec, layout, machine, WEIGHT_BYTES, head, recompute=self.trains, kernels=kernels)
        return ModelCall(cost)

    def seconds(self, call: ModelCall) -> float:
        if self.name.endswith("Gen"):
            return call.generate_seconds(self.batch, self.prompt_tokens, self.output_tokens, self.microbatches)
        if self.trains:
            microbatches = 2 * call.model.layout.pp * self.microbatches
            return call.train_seconds(self.batch, self.sample_tokens, self.minibatches, microbatches)
        return call.infer_seconds(self.batch, self.sample_tokens, self.microbatches)

    def microbatch_sequences(self, layout: ParallelLayout) -> float:
        parts = layout.dp * layout.pp * self.microbatches
        return self.batch / (parts * 2 * self.minibatches if self.trains else parts)

    def options(self, size: int, machine: HardwareSpec) -> tuple[Option, ...]:
        """All layouts on so many ranks that cut the model, and the batch into whole samples."""
        degrees = [1 << bit for bit in range(size.bit_length())]
        found = []
        for tp in (tp for tp in degrees if tp <= machine.devices_per_node):
            for pp in (pp for pp in degrees if tp * pp <= size):
                layout = ParallelLayout(size // (tp * pp), tp, pp)
                try:
                    self.spec.check_layout(layout, self.name)
                except InputError:
                    continue
                sequences = self.microbatch_sequences(layout)
                if sequences >= 1 and sequences.is_integer():
                    found.append(self._option(layout, sequences, machine))
        return tuple(found)

    def _option(self, layout: ParallelLayout, sequences: float, machine: HardwareSpec) -> Option:
        call = self.on(layout, machine)
        cost, seconds, tokens = call.model, self.seconds(call), sequences * self.sample_tokens
        parameters = cost.memory.rank_parameters()
        weights, layers = WEIGHT_BYTES * parameters, max(map(len, layout.stage_layers(self.spec.layers)))
        if self.trains:
            kept = layout.pp * layers * cost.memory.kept_layer_bytes(tokens)  # no fewer micro-batches than stages
            return Option(layout, seconds, HELD_BYTES * parameters, weights + kept + cost.memory.passing_bytes(tokens))
        if self.name.endswith("Gen"):
            cache = layout.pp * tokens * cost.memory.kv_bytes_per_token() * layers / self.spec.layers
            passing = weights + cache + cost.memory.prefilling_bytes(sequences * self.prompt_tokens, sequences)
        else:
            passing = weights + cost.memory.scoring_bytes(tokens)
        return Option(layout, seconds, 0.0, passing, call.weights_seconds() if self.name in SOURCES else 0.0)


def mesh_problem(works: dict[str, CallWork], ranks: int, sizes: list[int], machine: HardwareSpec) -> MeshProblem:
    """The calls of PHASES by name, on meshes of these sizes wherever they begin at a multiple of the smallest."""
    meshes, least = meshes_anywhere(ranks, sizes, min(sizes)), min(sizes)

    def call(name: str) -> Call:
        options = {size: works[name].options(size, machine) for size in sizes}
        return Call(name, on_equal_meshes(meshes, options), SOURCES.get(name, ""))

    phases = tuple(tuple(map(call, phase)) for phase in PHASES)
    return MeshProblem((machine.memory_bytes,) * ranks, least, phases)
