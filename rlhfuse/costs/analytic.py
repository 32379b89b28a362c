"""What work costs, in seconds and bytes: the roofline of one model (paper section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.costs import gpu_bytes
from rlhfuse.costs.collectives import RankGroup, send_seconds
from rlhfuse.costs.cost_model import MicrobatchTokens, StageSeconds
from rlhfuse.costs.kernels import Kernels
from rlhfuse.schedule.ir.problem import StageCosts

BACKWARD_OVER_FORWARD = 2  # gradients of inputs and of weights are one forward's products each
LAUNCHES = 0.2  # of W, as a share of those of a layer's forward
GATHERS = 2  # in W: inputs of the layers whose outputs tensor ranks share


@dataclass(frozen=True)
class AnalyticCost:
    """Roofline of one replica of one model. `layout.dp` does not matter to a replica except to ZeRO-1.

    One layer of a forward over T tokens takes

        max(FLOPs / rate, bytes moved / bandwidth, floor) + two all-reduces of T x hidden elements,

    on a CPU the sum of the three instead of their maximum, with FLOPs = 2 x parameters x T + 4 x heads x head_dim x
    (query, key) pairs, and bytes = weights + keys and values.
    A decode step is the same with T = batch, but what its short kernels need to start and end is added. With `kernels`
    so is what other kernels move: between the products, of the logits, and in training of weight gradients.
    """

    spec: ModelSpec
    layout: ParallelLayout
    hardware: HardwareSpec
    element_bytes: int
    scalar_head: bool = False
    sequence_parallel: bool = False  # in training
    recompute: bool = False  # in training: each layer runs again before its backward
    kernels: Kernels | None = None  # None: of other software, where rates hold for all of a layer

    def with_cut(self, cut: tuple[int, ...] | None) -> AnalyticCost:
        """The same with so many layers on each stage."""
        return self if cut == self.layout.cut else replace(self, layout=replace(self.layout, cut=cut))

    # ---- seconds

    def prefill_seconds(self, tokens: float, sequences: float = 1) -> float:
        """Forward over prompts; only the last token of each goes through the output layer."""
        return self._forward(tokens, sequences, sequences, self.prefill_starts)

    @property
    def prefill_starts(self) -> float:
        """Seconds of a layer's launches in a prefill, whose kernels are on a CPU those of a decode step."""
        return self.hardware.decode_layer_seconds if self.in_turns else self.hardware.launch_seconds

    def forward_seconds(self, tokens: float, sequences: float = 1, outputs: float | None = None) -> float:
        """Forward over packed sequences with an output for every token, or for so many."""
        outputs, machine = tokens if outputs is None else outputs, self.hardware
        passed = machine.pass_seconds if tokens > 0 else 0.0
        return self._forward(tokens, sequences, outputs, machine.launch_seconds) + passed

    def _forward(self, tokens: float, sequences: float, outputs: float, starts: float) -> float:
        if tokens <= 0:
            return 0.0
        return self.spec.layers * self.layer_seconds(tokens, sequences, starts) + self.head_seconds(outputs)

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        """One token for each of `batch` sequences with `context_tokens` of context in all."""
        if batch <= 0:
            return 0.0
        step = self.spec.layers * self.decode_layer_seconds(batch, context_tokens) + self.head_seconds(batch)
        return step + self.sampler_seconds(batch)

    def capture_seconds(self) -> float:
        """Recording one shape of a decode step as a CUDA graph."""
        seconds = self.hardware.recorded_launch_seconds
        return self.kernels.capture_seconds(self.spec, self.layout.tp, seconds) if self.kernels else 0.0

    def sampler_seconds(self, batch: float) -> float:
        """Logits on their way to the sampler; a layer's activations of a step stay in the device's cache."""
        return self._logit_seconds(batch, self.kernels.sampler_bytes) if self.kernels else 0.0

    def layer_seconds(self, tokens: float, sequences: float, starts: float | None = None) -> float:
        """One layer's forward over `tokens` tokens of `sequences` equal sequences; `starts`: its launches' seconds."""
        starts = self.hardware.launch_seconds if starts is None else starts
        causal_pairs = tokens * (tokens / max(sequences, 1) + 1) / 2
        roofline = self._roofline_seconds(tokens, causal_pairs, tokens)
        moved = self._moved_seconds(tokens)
        return self._both(roofline, starts) + moved + 2 * self._all_reduce_seconds(tokens)

    def decode_layer_seconds(self, batch: float, context_tokens: float) -> float:
        """One layer of a decode step: every new token attends to its own context."""
        roofline = self._roofline_seconds(batch, context_tokens, context_tokens)
        return self.hardware.decode_layer_seconds + roofline + self.decode_all_reduce_seconds(batch)

    def decode_all_reduce_seconds(self, batch: float) -> float:
        """Seconds of the two all-reduces of a layer in a decode step; their messages are short."""
        kernels, tp = self.kernels, self.layout.tp
        if not self._on_gpu:
            return 2 * self._all_reduce_seconds(batch)
        volume = self._tensor_ranks.sum_seconds(self._message_bytes(batch))
        if kernels is None or tp == 1:  # starting them up is in the floor of other software's step
            return 2 * volume
        if kernels.switch_sums and self.hardware.switch_sums and tp <= self.hardware.devices_per_node:
            # every rank sends its part to the switch once, and its share of the sum
            sent = (1 + 1 / tp) * batch * self.spec.hidden * self.element_bytes
            return 2 * max(self.hardware.switch_sum_seconds, sent / self.hardware.node_link_bandwidth)
        return 2 * max(self.hardware.short_sum_seconds, volume)

    def _moved_seconds(self, tokens: float) -> float:
        """What the kernels of a layer's forward move beside its products."""
        if not self.kernels:
            return 0.0
        per_token = self.kernels.forward_bytes(self.spec, self._whole_hidden, self.layout.tp, self.element_bytes)
        return tokens * per_token / self.moving_bandwidth

    def _logit_seconds(self, tokens: float, logit_bytes: float) -> float:
        """Moving `logit_bytes` for every logit of `tokens` tokens."""
        if self.scalar_head:
            return 0.0
        return tokens * self.spec.vocab / self.layout.tp * logit_bytes / self.moving_bandwidth

    def _roofline_seconds(self, tokens: float, pairs: float, kv_tokens: float) -> float:
        """One layer over `tokens` tokens: `pairs` (query, key) pairs, keys and values of `kv_tokens` tokens read."""
        spec, machine, tp = self.spec, self.hardware, self.layout.tp
        flops = 2 * spec.layer_parameters * tokens + 4 * spec.heads * spec.head_dim * pairs
        kv_bytes = 2 * spec.kv_heads * spec.head_dim * self.element_bytes * kv_tokens
        moved = spec.layer_parameters * self.element_bytes + kv_bytes
        return self._both(flops / (tp * machine.flops), moved / (tp * machine.memory_bandwidth))

    @property
    def moving_bandwidth(self) -> float:
        """Bytes/s that kernels between the products reach."""
        return self.hardware.memory_bandwidth * self.hardware.moved_share

    @property
    def in_turns(self) -> bool:
        """Whether a device launches, reads and multiplies in turns, as a CPU's core does; on a GPU one hides others."""
        return not self._on_gpu

    def _both(self, computing: float, moving: float) -> float:
        return computing + moving if self.in_turns else max(computing, moving)

    def head_seconds(self, outputs: float) -> float:
        """The output layer for `outputs` tokens; a scalar head is free."""
        if self.scalar_head:
            return 0.0
        machine, tp, weights = self.hardware, self.layout.tp, self.spec.embedding_parameters
        flops_seconds = 2 * weights * outputs / (tp * machine.flops)
        return self._both(flops_seconds, weights * self.element_bytes / (tp * machine.memory_bandwidth))

    def _all_reduce_seconds(self, tokens: float) -> float:
        """The hidden states of `tokens` tokens over the tensor-parallel group."""
        return self._tensor_ranks.all_reduce_seconds(self._message_bytes(tokens))

    def _message_bytes(self, tokens: float) -> float:
        return tokens * self.spec.hidden * self.element_bytes

    @property
    def _tensor_ranks(self) -> RankGroup:
        return RankGroup(self.hardware, self.layout.tp)

    # ---- training

    @property
    def splits(self) -> bool:
        return True

    def stage_costs(
        self,
        micro: MicrobatchTokens,
        tick_seconds: float = 1e-6,
        split: bool = False,
        seconds: StageSeconds | None = None,
    ) -> StageCosts:
        """One micro-batch on every pipeline stage: whole ticks of `tick_seconds`, at least one, and bytes per rank.

        `seconds`: those of the ticks, in place of the micro-batch's own.
        """
        cut = tuple(map(len, self.layout.stage_layers(self.spec.layers)))
        activation = []
        for stage, layers in enumerate(cut):
            kept = layers * self.kept_layer_bytes(micro.tokens) + self._kept_end_bytes(stage, micro.tokens)
            activation.append(int(kept))
        times = (seconds or self.stage_seconds(micro)).ticks(cut, tick_seconds, split)
        if not split:
            return StageCosts(times[0], times[1], tuple(activation))
        return StageCosts(times[0], times[1], tuple(activation), times[2], self._kept_for_weights(cut, micro.tokens))

    def _kept_for_weights(self, cut: Sequence[int], tokens: float) -> tuple[int, ...]:
        """Bytes of each stage from B to W. On a GPU the gradient that a stage receives is counted as received."""
        received = self.hidden_bytes(tokens) if self._on_gpu and not self._cuts_tokens else 0
        every = gpu_bytes.kept_by_split_layer(self.spec, tokens, self.layout.tp, self._whole_hidden, self.element_bytes)
        return tuple(int(layers * every - received * (stage < len(cut) - 1)) for stage, layers in enumerate(cut))

    def stage_seconds(self, micro: MicrobatchTokens) -> StageSeconds:
        """One micro-batch, of a layer and of the ends."""
        tokens, sequences, outputs = micro
        machine, passed = self.hardware, self.hardware.pass_seconds
        layer, head = self.layer_seconds(tokens, sequences), self.head_seconds(outputs)
        again = layer if self.recompute else 0.0
        backward, head_backward = BACKWARD_OVER_FORWARD * layer + again, BACKWARD_OVER_FORWARD * head
        if self.in_turns:
            backward -= machine.launch_seconds  # it launches as much as a forward does
        if kernels := self.kernels:
            width, tp = self._whole_hidden, self.layout.tp
            backward -= BACKWARD_OVER_FORWARD * self._moved_seconds(tokens)
            back = tokens * kernels.backward_bytes(self.spec, width, tp, self.element_bytes)
            backward += back / self.moving_bandwidth
            weights = self.spec.layer_parameters / tp
            product = 2 * weights * tokens / machine.flops  # of the weight gradients, among the others
            backward += max(0.0, weights * kernels.gradient_sum_bytes / machine.memory_bandwidth - product)
            head_backward += head if kernels.logits_again else 0.0
            head_backward += self._logit_seconds(outputs, kernels.tile_backward_bytes)
            chunks = max(1.0, outputs * self.spec.hidden * 4 / kernels.head_chunk_bytes)
            head_backward += chunks * self._logit_seconds(self.spec.hidden, kernels.head_gradient_sum_bytes)
            head += self._logit_seconds(outputs, kernels.tile_forward_bytes)
        inner, last = ((passed, passed),) * (self.layout.stages - 1), (head + passed, head_backward + passed)
        return StageSeconds((layer, backward), (*inner, last), self._split(tokens, backward))

    def _split(self, tokens: float, backward: float) -> tuple[float, float]:
        """B and W of a layer whose whole backward takes so long.

        W reads once more what is kept for it, and gathers what sequence parallelism has cut beneath no other product.
        Collectives of B are in `backward`, which hides none.
        """
        spec, machine, tp = self.spec, self.hardware, self.layout.tp
        product = 2 * spec.layer_parameters * tokens / (tp * machine.flops)
        if self.kernels:
            sums = spec.layer_parameters / tp * self.kernels.gradient_sum_bytes / machine.memory_bandwidth
            product = max(product, sums)
        read = (
            gpu_bytes.kept_by_split_layer(spec, tokens, tp, self._whole_hidden, self.element_bytes)
            / machine.memory_bandwidth
        )
        gathered = 0.0
        if self._cuts_tokens:
            gathered = GATHERS * self._tensor_ranks.gather_seconds(self._message_bytes(tokens))
        return backward - product, max(product + read, LAUNCHES * machine.launch_seconds) + gathered

    def optimizer_step_seconds(self, place: int | None = None) -> float:
        """After the last micro-batch of a mini-batch: gradients summed over dp, Adam, weights gathered (ZeRO-1).

        Ranks go tensor, pipeline, data: replicas are tp x pp ranks apart. On a CPU Adam is bound by memory too.
        """
        if not (kernels := self.kernels):
            return 0.0
        layout = self.layout
        replicas = RankGroup(self.hardware, layout.dp, stride=layout.tp * layout.pp)
        exchanged = sum(
            replicas.gather_seconds(sent) for sent in (self.gradient_bytes(place), self.weights_bytes(place))
        )
        per_parameter = kernels.zero_bytes + kernels.adam_bytes / layout.dp
        updated = self._parameters(place) * per_parameter / self.hardware.memory_bandwidth
        return (updated + exchanged) * self.hardware.step_waiting

    def kept_layer_bytes(self, tokens: float) -> float:
        """What one layer keeps from its forward to its backward on one rank: its input alone where it is run again."""
        if self.recompute:
            return tokens * self._whole_hidden * self.element_bytes
        return self.layer_activation_bytes(tokens)

    def layer_activation_bytes(self, tokens: float) -> float:
        """What the backward of one layer needs on one rank.

        On a CPU, kept whole on every tensor rank, but cut under sequence parallelism: of both norms the input in
        float32, the normed input and the output. Always cut by tp: query, key and value joined, query and key once
        more after the rotation, the attention's output of each sequence and of all, and gate, its activation, up and
        their product. The CPU's kernels for float32 keep less: of a norm the input, the output and one number, of
        attention query, key, value and output once each, and one number a head; not the activation.
        """
        spec, norms = self.spec, 2 * self._whole_hidden
        if self._on_gpu:
            return gpu_bytes.kept_by_layer(spec, tokens, self.layout.tp, self._whole_hidden, self.element_bytes)
        if self.hardware.name == "cpu" and self.element_bytes == 4:
            cut = 2 * (spec.heads + spec.kv_heads) * spec.head_dim + spec.heads + 3 * spec.mlp
            return tokens * 4 * (2 * norms + norms / spec.hidden + cut / self.layout.tp)
        cut = (4 * spec.heads + 3 * spec.kv_heads) * spec.head_dim + 4 * spec.mlp
        return tokens * (norms * (4 + 2 * self.element_bytes) + cut / self.layout.tp * self.element_bytes)

    def logits_bytes(self, tokens: float) -> float:
        """Float32 logits of `tokens` tokens on one rank; of a scalar head one value each."""
        return tokens * 4 * (1 if self.scalar_head else self.spec.vocab / self.layout.tp)

    def passing_bytes(self, tokens: float, place: int | None = None) -> float:
        """What passes while one micro-batch runs, beside what is kept: gradients of one layer's activations, where
        layers are run again one of these, on the last stage logits and their gradient, on GPUs a tile of both. On a
        GPU's first stage the table's gradient, when its layers keep nothing any more."""
        last = place in (None, self.layout.pp - 1)
        if self._on_gpu:
            spec, shape = self.spec, (self.spec, tokens, self.layout.tp)
            back = gpu_bytes.passing_in_backward(*shape, self._whole_hidden, self.element_bytes)
            hidden = tokens * self._whole_hidden * self.element_bytes  # a layer's input is kept already
            back += self.layer_activation_bytes(tokens) - hidden if self.recompute else 0
            if place in (None, 0):
                kept = len(self.layout.stage_layers(spec.layers)[0]) * self.kept_layer_bytes(tokens)
                table = gpu_bytes.passing_in_embedding(*shape, self.element_bytes)
                back = max(back, table - kept)
            loss = last and not self.scalar_head
            return max(back, gpu_bytes.passing_in_loss(*shape, self.element_bytes) if loss else 0)
        return self.layer_activation_bytes(tokens) * (2 if self.recompute else 1) + 2 * last * self.logits_bytes(tokens)

    def split_passing_bytes(self, tokens: float) -> tuple[float, float]:
        """On a GPU, of a split backward: what passes in B less than in a whole one, for it is held until W and counted
        so, where layers are run again; and in W: inputs that are gathered, of one product and the next."""
        kept = gpu_bytes.kept_by_split_layer(self.spec, tokens, self.layout.tp, self._whole_hidden, self.element_bytes)
        return max(0.0, kept - self.kept_layer_bytes(tokens)), 2 * self.gathering_bytes(tokens)

    def receiving_bytes(self, tokens: float, place: int) -> float:
        """On a GPU, memory that stays: of each stage here the gradients of its output, and as many hidden states as
        micro-batches are under way, in training's usual order, and one that came early."""
        if not self._on_gpu:
            return 0.0
        stages, last = range(place, self.layout.stages, self.layout.pp), self.layout.stages - 1
        slots = sum((self.layout.pp - place + 1 if stage > 0 else 0) + (stage < last) for stage in stages)
        return slots * self.hidden_bytes(tokens)

    def hidden_bytes(self, tokens: float) -> float:
        """One hidden state between two stages, on one rank."""
        return tokens * self._whole_hidden * self.element_bytes

    def send_seconds(self, tokens: float) -> float:
        """One hidden state to the next stage, each tensor rank to its peer; 0 without a pipeline.

        A pipeline is tp x pp ranks in a row: where these do not lie within one machine its slowest hop counts.
        """
        devices, ranks = self.hardware.devices_per_node, self.layout.tp * self.layout.pp
        if self.layout.pp == 1:
            return 0.0
        return send_seconds(self.hardware, self.hidden_bytes(tokens), across=devices % ranks > 0)

    def gathering_bytes(self, tokens: float) -> float:
        """On a GPU, memory that stays: Megatron's buffer for hidden states that sequence parallelism has cut."""
        return tokens * self.spec.hidden * self.element_bytes if self._on_gpu and self._cuts_tokens else 0.0

    def rotation_bytes(self, tokens: float) -> float:
        """On a GPU, memory that stays: cosines and sines of so many positions in float32."""
        return tokens * self.spec.head_dim * 4 if self._on_gpu else 0.0

    def prefilling_bytes(self, tokens: float, outputs: float) -> int:
        """What a step of the engine over so many tokens holds: a layer's activations, then logits of `outputs`."""
        layer = self.layer_activation_bytes(tokens)
        if self._on_gpu:
            layer = gpu_bytes.prefilling_bytes(self.spec, tokens, self.layout.tp, self.element_bytes)
        return int(max(layer, 2 * self.logits_bytes(outputs)))

    def scoring_bytes(self, tokens: float) -> int:
        """What a forward over a packed batch holds, with an output for every token."""
        if not self._on_gpu:
            return int(max(self.layer_activation_bytes(tokens), 2 * self.logits_bytes(tokens)))
        spec, rows = self.spec, tokens * self.spec.hidden * self.element_bytes
        layer = gpu_bytes.scoring_bytes(spec, tokens, self.layout.tp, self.element_bytes)
        if self.scalar_head:
            return int(layer)
        loss = rows + gpu_bytes.passing_in_loss(spec, tokens, self.layout.tp, self.element_bytes, backward=False)
        return int(max(layer, loss))

    def _kept_end_bytes(self, stage: int, tokens: float) -> float:
        """What a stage keeps beside its layers: on a CPU logits; on a GPU its output, on the last stage what goes into
        the final norm, the head, and the loss; less the received input, which `receiving_bytes` counts."""
        last = stage == self.layout.stages - 1
        if not self._on_gpu:
            return tokens * self.spec.vocab * 4 / self.layout.tp if last and not self.scalar_head else 0
        hidden, whole = self._whole_hidden * self.element_bytes, self.spec.hidden * self.element_bytes
        head = 4 * self.spec.hidden if self.scalar_head else whole  # the rows that the head multiplies
        return tokens * ((2 * hidden + head if last else hidden) - (hidden if stage > 0 else 0))

    @property
    def _cuts_tokens(self) -> bool:
        return self.sequence_parallel and self.layout.tp > 1

    @property
    def _on_gpu(self) -> bool:
        return self.hardware.name != "cpu"

    @property
    def _whole_hidden(self) -> float:
        """Elements per token of one hidden state between the matrix products, on one rank."""
        return self.spec.hidden / (self.layout.tp if self.sequence_parallel else 1)

    # ---- bytes of one rank, at a place of a pipeline or on the fullest

    def rank_parameters(self) -> int:
        """Parameters on the fullest rank."""
        return max(self.place_parameters())

    def place_parameters(self) -> tuple[int, ...]:
        """Parameters of a rank at each place of a pipeline; of an interleaved one it holds several stages.

        Norms, and the row of a scalar head, are whole on every tensor rank.
        """
        return self._by_place

    @cached_property
    def _by_place(self) -> tuple[int, ...]:
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

    def _parameters(self, place: int | None) -> int:
        return self.rank_parameters() if place is None else self.place_parameters()[place]

    def weights_bytes(self, place: int | None = None) -> int:
        return self._parameters(place) * self.element_bytes

    def gradient_bytes(self, place: int | None = None) -> int:
        """Gradients are accumulated in float32."""
        return self._parameters(place) * 4

    def optimizer_bytes(self, place: int | None = None) -> int:
        """Adam's two moments in float32, and the main weights, cut over dp (ZeRO-1)."""
        return -(-self._parameters(place) * 8 // self.layout.dp) + self.main_weights_bytes(place)

    def largest_weight_bytes(self, place: int) -> int:
        """Bytes of the largest matrix of weights on a rank there."""
        spec, end = self.spec, place == 0 or place == self.layout.pp - 1 and not self.scalar_head
        elements = max(2 * spec.mlp * spec.hidden, spec.embedding_parameters if end else 0)
        return -(-elements // self.layout.tp) * self.element_bytes

    def main_weights_bytes(self, place: int | None = None) -> int:
        """A float32 copy of lower-precision weights, cut over dp."""
        return 0 if self.element_bytes == 4 else -(-self._parameters(place) * 4 // self.layout.dp)

    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token on one rank."""
        return self.spec.kv_bytes_per_token(self.element_bytes) / self.layout.tp
