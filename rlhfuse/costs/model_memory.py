"""Bytes of a model on one rank, at a place of a pipeline or on the fullest: on a CPU, and on a GPU with flash
attention, fused norms and SwiGLU, and tiles of logits.

T tokens, H hidden (a rank's part of it under sequence parallelism); cut by tp: A the query heads' elements, K the key
heads', W the MLP's width, V the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.base.power_of_two import table_rows
from rlhfuse.config.spec import CPU, GPU, HardwareSpec, ModelSpec
from rlhfuse.config.values import Recompute

LOGITS_BYTES, GRADIENT_BYTES, FLOAT_BYTES = 256 << 20, 768 << 20, 6  # of the loss: its logits and gradients at a time


@dataclass(frozen=True)
class ModelMemory(ABC):
    """Weights and what follows from their number; activations are a device's. Bytes, unless said otherwise."""

    spec: ModelSpec
    layout: ParallelLayout
    element_bytes: int
    scalar_head: bool
    sequence_parallel: bool
    recompute: Recompute

    # ---- parameters

    @cached_property
    def place_parameters(self) -> tuple[int, ...]:
        """Parameters of a rank at each place of a pipeline; of an interleaved one it holds several stages.

        Norms, and the row of a scalar head, are whole on every tensor rank.
        """
        spec, tp, places = self.spec, self.layout.tp, [0] * self.layout.pp
        for stage, layers in enumerate(self.layout.stage_layers(spec.layers)):
            whole = len(layers) * spec.norm_parameters
            if stage == self.layout.stages - 1:
                whole += spec.hidden * (2 if self.scalar_head else 1)
            held = len(layers) * spec.layer_parameters + self.end_parameters()[stage]
            places[stage % self.layout.pp] += -(-(held - whole) // tp) + whole
        return tuple(places)

    def end_parameters(self) -> tuple[int, ...]:
        """Parameters of each stage beside its layers: embedding; final norm and output layer, unless tied here."""
        spec, ends = self.spec, [0] * self.layout.stages
        ends[0] += spec.embedding_parameters
        tied_here = spec.tied_embeddings and len(ends) == 1
        ends[-1] += spec.hidden
        ends[-1] += spec.hidden if self.scalar_head else (0 if tied_here else spec.embedding_parameters)
        return tuple(ends)

    def parameters(self, place: int | None = None) -> int:
        """Parameters of a rank there; None: of the fullest."""
        return max(self.place_parameters) if place is None else self.place_parameters[place]

    def weights_bytes(self, place: int | None = None) -> int:
        return self.parameters(place) * self.element_bytes

    def gradient_bytes(self, place: int | None = None) -> int:
        """Gradients are accumulated in float32."""
        return self.parameters(place) * 4

    def head_sum_bytes(self) -> int:
        """The float32 sum of its own of an output layer on a GPU whose weight is the embedding's."""
        return 0

    def optimizer_bytes(self, place: int | None = None) -> int:
        """Adam's two moments in float32, and the main weights, cut over dp (ZeRO-1)."""
        return -(-self.parameters(place) * 8 // self.layout.dp) + self.main_weights_bytes(place)

    def largest_weight_bytes(self, place: int) -> int:
        """The largest matrix of weights on a rank there."""
        spec, end = self.spec, place == 0 or place == self.layout.pp - 1 and not self.scalar_head
        elements = max(2 * spec.mlp * spec.hidden, spec.embedding_parameters if end else 0)
        return -(-elements // self.layout.tp) * self.element_bytes

    def main_weights_bytes(self, place: int | None = None) -> int:
        """A float32 copy of lower-precision weights, cut over dp."""
        return 0 if self.element_bytes == 4 else -(-self.parameters(place) * 4 // self.layout.dp)

    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token."""
        return self.spec.kv_bytes_per_token(self.element_bytes) / self.layout.tp

    # ---- activations

    @property
    def hidden(self) -> float:
        """Elements per token of one hidden state between the matrix products."""
        return self.spec.hidden / (self.layout.tp if self.sequence_parallel else 1)

    @property
    def cuts_tokens(self) -> bool:
        return self.sequence_parallel and self.layout.tp > 1

    def hidden_bytes(self, tokens: float) -> float:
        """One hidden state between two stages."""
        return tokens * self.hidden * self.element_bytes

    def logits_bytes(self, tokens: float) -> float:
        """Float32 logits of `tokens` tokens; of a scalar head one value each."""
        return tokens * 4 * (1 if self.scalar_head else self.spec.vocab / self.layout.tp)

    def stage_bytes(self, cut: Sequence[int], tokens: float) -> tuple[int, ...]:
        """What each stage with so many layers keeps of a micro-batch from its forward to its backward."""
        layer = self.kept_layer_bytes(tokens)
        return tuple(int(layers * layer + self._kept_end_bytes(stage, tokens)) for stage, layers in enumerate(cut))

    def kept_layer_bytes(self, tokens: float) -> float:
        """What one layer keeps from its forward to its backward: its input alone where it is run again."""
        if self.recompute == "full":
            return self.hidden_bytes(tokens)
        remade = self.remade_bytes(tokens) if self.recompute == "selective" else 0
        return self.layer_activation_bytes(tokens) - remade

    def kept_for_weights(self, cut: Sequence[int], tokens: float) -> tuple[int, ...]:
        """What each stage keeps from B to W."""
        layer = self.split_layer_bytes(tokens)
        return tuple(int(layers * layer) for layers in cut)

    def split_layer_bytes(self, tokens: float) -> float:
        """What a split backward keeps of a layer from B to W: input and output gradient of its four linear layers.

        Of the layers cut by outputs (qkv, fc1) the input as it was kept and the part of the output's gradient; of those
        cut by inputs (proj, fc2) the part of the input and the whole gradient of the output.
        """
        spec, tp = self.spec, self.layout.tp
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        inputs = 2 * self.hidden + (queries + spec.mlp) / tp
        gradients = (queries + 2 * keys + 2 * spec.mlp) / tp + 2 * spec.hidden
        return tokens * (inputs + gradients) * self.element_bytes

    def split_passing_bytes(self, tokens: float) -> tuple[float, float]:
        """What passes in B of a split backward less than in a whole one, for it is held until W and counted so, where
        layers are run again; and in W: inputs that are gathered, of one product and the next."""
        kept = self.split_layer_bytes(tokens)
        return max(0.0, kept - self.kept_layer_bytes(tokens)), 2 * self.gathering_bytes(tokens)

    def layer_activation_bytes(self, tokens: float) -> float:
        """Activations that the backward of one layer needs: input and output of both norms; query, key, value and
        attention output; inputs of head norms; gate, up and their product; a float32 number for each row and norm, and
        for each row and head. All but those of the norms are cut by tp."""
        spec = self.spec
        keys = spec.kv_heads * spec.head_dim
        divided = 2 * (spec.heads * spec.head_dim + keys) + 3 * spec.mlp + (self.normed_heads if spec.qk_norm else 0)
        rows = 4 * self.hidden + divided / self.layout.tp
        return tokens * (rows * self.element_bytes + 4 * (2 * self.hidden / spec.hidden + spec.heads / self.layout.tp))

    @property
    def normed_heads(self) -> int:
        """Elements per token that norms of heads keep."""
        return (self.spec.heads + 2 * self.spec.kv_heads) * self.spec.head_dim

    def remade_bytes(self, tokens: float) -> float:
        """What selective recomputation makes again of these: outputs of both norms and of SwiGLU."""
        return tokens * (2 * self.hidden + self.spec.mlp / self.layout.tp) * self.element_bytes

    @abstractmethod
    def _kept_end_bytes(self, stage: int, tokens: float) -> float:
        """What a stage keeps beside its layers."""

    @abstractmethod
    def passing_bytes(self, tokens: float, place: int | None = None) -> float:
        """What passes while one micro-batch runs, beside what is kept."""

    @abstractmethod
    def prefilling_bytes(self, tokens: float, outputs: float) -> int:
        """What a step of the engine over so many tokens holds: a layer's activations, then logits of `outputs`."""

    @abstractmethod
    def scoring_bytes(self, tokens: float) -> int:
        """What a forward over a packed batch holds, with an output for every token."""

    def graph_bytes(self, sequences: float) -> int:
        """What recorded decode steps of so many sequences reserve for their activations."""
        return 0

    def receiving_bytes(self, tokens: float, place: int) -> float:
        """Memory that stays for what stages receive."""
        return 0.0

    def gathering_bytes(self, tokens: float) -> float:
        """Memory that stays for hidden states that sequence parallelism has cut."""
        return 0.0

    def rotation_bytes(self, tokens: float) -> float:
        """Memory that stays for cosines and sines, in float32, of so many positions."""
        return table_rows(int(tokens)) * self.spec.head_dim * 4


class CpuMemory(ModelMemory):
    """Kernels of our own for float32, torch's for others; logits are whole."""

    @property
    def normed_heads(self) -> int:
        """Queries and keys, and of float32 ones a number for each head."""
        spec = self.spec
        return (spec.heads + spec.kv_heads) * (spec.head_dim + 1)

    def _kept_end_bytes(self, stage: int, tokens: float) -> float:
        last = stage == self.layout.stages - 1
        return tokens * self.spec.vocab * 4 / self.layout.tp if last and not self.scalar_head else 0

    def passing_bytes(self, tokens: float, place: int | None = None) -> float:
        """Gradients of one layer's activations, what is run again of these, and on the last stage logits and their
        gradient."""
        last, layer = place in (None, self.layout.pp - 1), self.layer_activation_bytes(tokens)
        again = {"none": 0.0, "selective": self.remade_bytes(tokens), "full": layer}[self.recompute]
        return layer + again + 2 * last * self.logits_bytes(tokens)

    def prefilling_bytes(self, tokens: float, outputs: float) -> int:
        return int(max(self.layer_activation_bytes(tokens), 2 * self.logits_bytes(outputs)))

    def scoring_bytes(self, tokens: float) -> int:
        return self.prefilling_bytes(tokens, tokens)


class GpuMemory(ModelMemory):
    """What the CUDA kernels of this project keep; on a stage also what it receives, in memory that stays."""

    def head_sum_bytes(self) -> int:
        tied = self.spec.tied_embeddings and self.layout.stages == 1 and not self.scalar_head
        return tied * -(-4 * self.spec.embedding_parameters // self.layout.tp)

    def _kept_end_bytes(self, stage: int, tokens: float) -> float:
        """Its output, on the last stage what goes into the final norm, the head, and the loss; less the received input,
        which `receiving_bytes` counts."""
        last = stage == self.layout.stages - 1
        hidden, whole = self.hidden * self.element_bytes, self.spec.hidden * self.element_bytes
        head = 4 * self.spec.hidden if self.scalar_head else whole  # the rows that the head multiplies
        return tokens * ((2 * hidden + head if last else hidden) - (hidden if stage > 0 else 0))

    def kept_for_weights(self, cut: Sequence[int], tokens: float) -> tuple[int, ...]:
        """The gradient that a stage receives is counted as received."""
        received = 0 if self.cuts_tokens else self.hidden_bytes(tokens)
        layer, last = self.split_layer_bytes(tokens), len(cut) - 1
        return tuple(int(layers * layer - received * (stage < last)) for stage, layers in enumerate(cut))

    def passing_bytes(self, tokens: float, place: int | None = None) -> float:
        """Gradients of one layer's activations, and those of these that are made again; on the last stage a tile of
        logits and its gradient; on the first the table's gradient, when its layers keep nothing any more."""
        back = self._layer_backward_bytes(tokens)
        back += self.layer_activation_bytes(tokens) - self.kept_layer_bytes(tokens)
        if place in (None, 0):
            kept = len(self.layout.stage_layers(self.spec.layers)[0]) * self.kept_layer_bytes(tokens)
            table = (tokens * self.spec.hidden + self.spec.embedding_parameters / self.layout.tp) * self.element_bytes
            back = max(back, table - kept)
        loss = place in (None, self.layout.pp - 1) and not self.scalar_head
        return max(back, self.loss_bytes(tokens) if loss else 0)

    def _layer_backward_bytes(self, tokens: float) -> float:
        """While the MLP of a stage's last layer runs back: gradients of its output, of the product, and of gate and up.
        Under sequence parallelism that of the output also as the rows of all tensor ranks."""
        whole = self.spec.hidden if self.cuts_tokens else 0
        return tokens * (self.hidden + whole + 3 * self.spec.mlp / self.layout.tp) * self.element_bytes

    def loss_bytes(self, tokens: float, backward: bool = True) -> float:
        """Some rows with all their logits; with `backward` also the gradient of logits of more rows, and that of all
        hidden states."""
        hidden, width = self.spec.hidden, self.spec.vocab / self.layout.tp
        logits = min(tokens * 4 * width, LOGITS_BYTES)
        if not backward:
            return logits
        chunk = min(tokens * (width * self.element_bytes + FLOAT_BYTES * hidden), GRADIENT_BYTES)
        return logits + chunk + tokens * hidden * self.element_bytes

    def prefilling_bytes(self, tokens: float, outputs: float) -> int:
        """Query, key and value joined, the rotated query, gate and up, and their product; with what was there before
        the layer and the product of that before, or with the normed input and the output."""
        spec, tp = self.spec, self.layout.tp
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        divided = (2 * queries + 2 * keys + 3 * spec.mlp) / tp
        layer = tokens * (2 * spec.hidden + divided + max(spec.mlp / tp, spec.hidden)) * self.element_bytes
        return int(max(layer, 2 * self.logits_bytes(outputs)))

    def scoring_bytes(self, tokens: float) -> int:
        """The input of the stage, the residual stream and its norm; with gate, up, their product and the MLP output, or
        with query, key and value joined and apart. Then the loss beside the rows that it is of."""
        spec, hidden = self.spec, self.spec.hidden
        attention = 2 * (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        layer = tokens * (3 * hidden + max(3 * spec.mlp / self.layout.tp + hidden, attention / self.layout.tp))
        layer *= self.element_bytes
        if self.scalar_head:
            return int(layer)
        return int(max(layer, tokens * hidden * self.element_bytes + self.loss_bytes(tokens, backward=False)))

    def graph_bytes(self, sequences: float) -> int:
        return self.prefilling_bytes(sequences, sequences)

    def receiving_bytes(self, tokens: float, place: int) -> float:
        """Gradients of the output of each stage here, and as many hidden states as micro-batches are under way, in
        training's usual order, and one that came early."""
        stages, last = range(place, self.layout.stages, self.layout.pp), self.layout.stages - 1
        slots = sum((self.layout.pp - place + 1 if stage > 0 else 0) + (stage < last) for stage in stages)
        return slots * self.hidden_bytes(tokens)

    def gathering_bytes(self, tokens: float) -> float:
        """Megatron's buffer."""
        return tokens * self.spec.hidden * self.element_bytes if self.cuts_tokens else 0.0


def memory_on(hardware: HardwareSpec) -> type[ModelMemory]:
    """How memory is counted on such a device."""
    return {CPU: CpuMemory, GPU: GpuMemory}[hardware.device]
