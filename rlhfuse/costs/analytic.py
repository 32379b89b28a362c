"""What work of one model costs in seconds, by its roofline (paper section 6)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.config.values import Recompute
from rlhfuse.costs.forms import roofline
from rlhfuse.costs.forms.collectives import RankGroup, send_seconds
from rlhfuse.costs.forms.form import DecodeRow, decode_seconds
from rlhfuse.costs.forms.roofline import Roofline
from rlhfuse.costs.forms.training import MicrobatchTokens, StageSeconds
from rlhfuse.costs.kernels import Kernels
from rlhfuse.costs.model_memory import ModelMemory, memory_on
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
    so is what other kernels move: between the products, of the logits, and in training of weight gradients. In training
    the host then launches ahead of a GPU: seconds are the device's, without a floor, and `host_seconds` stand beside.
    """

    spec: ModelSpec
    layout: ParallelLayout
    hardware: HardwareSpec
    element_bytes: int
    scalar_head: bool = False
    sequence_parallel: bool = False  # in training
    recompute: Recompute = "none"  # in training
    kernels: Kernels | None = None  # None: of other software, where rates hold for all of a layer

    def with_cut(self, cut: tuple[int, ...] | None) -> AnalyticCost:
        """The same with so many layers on each stage."""
        return self if cut == self.layout.cut else replace(self, layout=replace(self.layout, cut=cut))

    @cached_property
    def memory(self) -> ModelMemory:
        """Bytes of the same model on one rank."""
        how = self.scalar_head, self.sequence_parallel, self.recompute
        return memory_on(self.hardware)(self.spec, self.layout, self.element_bytes, *how)

    # ---- seconds

    @cached_property
    def roofline(self) -> Roofline:
        """The numbers that seconds of a forward and of a decode step follow from."""
        spec, hardware, tp = self.spec, self.hardware, self.layout.tp
        head = 0 if self.scalar_head else spec.embedding_parameters
        moved = 0.0
        if self.kernels:
            moved = self.kernels.forward_bytes(spec, self.memory.hidden, tp, self.element_bytes)
        return Roofline(
            layers=spec.layers,
            flops_per_token=2 * spec.layer_parameters,
            flops_per_pair=4 * spec.heads * spec.head_dim,
            flop_rate=tp * hardware.flops,
            weight_bytes=spec.layer_parameters * self.element_bytes,
            kv_bytes=2 * spec.kv_heads * spec.head_dim * self.element_bytes,
            byte_rate=tp * hardware.memory_bandwidth,
            in_turns=self.hardware.device.in_turns,
            floor=hardware.launch_seconds,
            decode_floor=hardware.decode_layer_seconds,
            moved_per_token=moved,
            bandwidth=self.moving_bandwidth,
            message_bytes=self._message_bytes(1),
            ranks=tp,
            link=self._tensor_ranks.bandwidth,
            sum_start=self._tensor_ranks.all_reduce_seconds(0),
            head_flops=2 * head,
            head_moving=head * self.element_bytes / (tp * hardware.memory_bandwidth),
            passed=hardware.pass_seconds,
            half_rate_tokens=hardware.half_rate_tokens,
            decode_share=hardware.decode_share,
        )

    def prefill_seconds(self, tokens: float, sequences: float = 1) -> float:
        """Forward over prompts; only the last token of each goes through the output layer."""
        return roofline.forward_seconds(self.prefill_roofline, tokens, sequences, sequences)

    @property
    def prefill_roofline(self) -> Roofline:
        """The same of a prefill, whose layers the engine launches: on a CPU as those of a decode step are."""
        hardware = self.hardware
        starts = hardware.decode_layer_seconds if hardware.device.in_turns else hardware.prefill_launch_seconds
        if not starts:  # recording launches a step twice, plainly and into the graph
            launches = self.kernels.layer_launches * hardware.recorded_launch_seconds / 2 if self.kernels else 0.0
            starts = min(launches or hardware.launch_seconds, hardware.launch_seconds)
        return self.roofline._replace(floor=starts, passed=0.0)

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        """One token for each of `batch` sequences with `context_tokens` of context in all."""
        if batch <= 0:
            return 0.0
        return decode_seconds(self.roofline, (), self.decode_row(batch), batch, context_tokens)

    def decode_row(self, batch: float) -> DecodeRow:
        """What a decode step of `batch` sequences has beside its layers' products."""
        # A layer's activations of a step stay in the device's cache; logits are on their way to the sampler.
        sampler = self._logit_seconds(batch, self.kernels.sampler_bytes) if self.kernels else 0.0
        return DecodeRow(self.decode_all_reduce_seconds(batch), self.head_seconds(batch), sampler)

    def capture_seconds(self) -> float:
        """Recording one shape of a decode step as a CUDA graph."""
        seconds = self.hardware.recorded_launch_seconds
        return self.kernels.capture_seconds(self.spec, self.layout.tp, seconds) if self.kernels else 0.0

    def head_seconds(self, outputs: float) -> float:
        """The output layer for `outputs` tokens; a scalar head is free."""
        return roofline.head_seconds(self.roofline, outputs)

    def decode_all_reduce_seconds(self, batch: float) -> float:
        """Seconds of the two all-reduces of a layer in a decode step; their messages are short."""
        kernels, tp = self.kernels, self.layout.tp
        if not self.hardware.device.recorded_steps:
            return 2 * self._tensor_ranks.all_reduce_seconds(self._message_bytes(batch))
        volume = self._tensor_ranks.sum_seconds(self._message_bytes(batch))
        if kernels is None or tp == 1:  # starting them up is in the floor of other software's step
            return 2 * volume
        if kernels.switch_sums and self.hardware.switch_sums and tp <= self.hardware.devices_per_node:
            # every rank sends its part to the switch once, and its share of the sum
            sent = (1 + 1 / tp) * batch * self.spec.hidden * self.element_bytes
            return 2 * max(self.hardware.switch_sum_seconds, sent / self.hardware.node_link_bandwidth)
        return 2 * max(self.hardware.short_sum_seconds, volume)

    def _logit_seconds(self, tokens: float, logit_bytes: float) -> float:
        """Moving `logit_bytes` for every logit of `tokens` tokens."""
        if self.scalar_head:
            return 0.0
        return tokens * self.spec.vocab / self.layout.tp * logit_bytes / self.moving_bandwidth

    @property
    def moving_bandwidth(self) -> float:
        """Bytes/s that kernels between the products reach."""
        return self.hardware.memory_bandwidth * self.hardware.moved_share

    def _message_bytes(self, tokens: float) -> float:
        return tokens * self.spec.hidden * self.element_bytes

    @property
    def _tensor_ranks(self) -> RankGroup:
        return RankGroup(self.hardware, self.layout.tp)

    # ---- training

    @property
    def host_seconds(self) -> tuple[float, ...]:
        """Seconds of each stage in which a GPU's host launches a micro-batch's layers, both ways, beside the device."""
        forward, backward = self._launches
        layer = backward + forward * (2 if self.recompute == "full" else 1) if self._launched_ahead else 0.0
        return tuple(len(layers) * layer for layers in self.layout.stage_layers(self.spec.layers))

    @property
    def _launched_ahead(self) -> bool:
        return self.kernels is not None and not self.hardware.device.in_turns

    @property
    def _launches(self) -> tuple[float, float]:
        """Seconds of a layer's forward and backward; that, where not measured, as long on a CPU and twice on a GPU."""
        forward, times = self.hardware.launch_seconds, 1 if self.hardware.device.in_turns else BACKWARD_OVER_FORWARD
        return forward, self.hardware.backward_launch_seconds or times * forward

    def stage_costs(
        self, micro: MicrobatchTokens, split: bool = False, seconds: StageSeconds | None = None
    ) -> StageCosts:
        """One micro-batch on every pipeline stage: whole ticks, at least one, and bytes per rank.

        `seconds`: those of the ticks, in place of the micro-batch's own.
        """
        cut = tuple(map(len, self.layout.stage_layers(self.spec.layers)))
        times = (seconds or self.stage_seconds(micro)).ticks(cut, split)
        activation = self.memory.stage_bytes(cut, micro.tokens)
        if not split:
            return StageCosts(times[0], times[1], activation)
        return StageCosts(times[0], times[1], activation, times[2], self.memory.kept_for_weights(cut, micro.tokens))

    def stage_seconds(self, micro: MicrobatchTokens) -> StageSeconds:
        """One micro-batch, of a layer and of the ends."""
        tokens, sequences, outputs = micro
        hardware, passed = self.hardware, self.hardware.pass_seconds
        head, (launches, back) = self.head_seconds(outputs), (0.0, 0.0) if self._launched_ahead else self._launches
        floored = [self.roofline._replace(floor=floor) for floor in (launches, back / BACKWARD_OVER_FORWARD)]
        layer, once = (roofline.layer_seconds(one, tokens, sequences) for one in floored)
        again = layer if self.recompute == "full" else 0.0
        backward, head_backward = BACKWARD_OVER_FORWARD * once + again, BACKWARD_OVER_FORWARD * head
        table = 0.0
        if kernels := self.kernels:
            width, tp = self.memory.hidden, self.layout.tp
            backward -= BACKWARD_OVER_FORWARD * roofline.moved_seconds(self.roofline, tokens)
            moved = self.spec, width, tp, self.element_bytes
            back = kernels.backward_bytes(*moved)
            back += kernels.remade_bytes(*moved) if self.recompute == "selective" else 0.0
            backward += tokens * back / self.moving_bandwidth
            weights = self.spec.layer_parameters / tp
            product = 2 * weights * (tokens + hardware.half_rate_tokens) / hardware.flops  # a third of the products
            backward += max(0.0, weights * kernels.gradient_sum_bytes / hardware.memory_bandwidth - product)
            tiles = self._logit_seconds(outputs, kernels.tile_forward_bytes)
            head_backward += self._logit_seconds(outputs, kernels.tile_backward_bytes)
            chunks = max(1.0, outputs * self.spec.vocab / tp * self.element_bytes / kernels.head_chunk_bytes)
            head_backward += chunks * self._logit_seconds(self.spec.hidden, kernels.head_gradient_sum_bytes)
            head = kernels.logits_products * (head + tiles)
            if kernels.gradients_ahead:
                head, head_backward = head + head_backward, 0.0
            table = kernels.table_gradient_bytes(self.spec, tokens, tp, self.element_bytes) / hardware.memory_bandwidth
        ends = [(passed, passed)] * self.layout.stages
        ends[-1] = head + passed, head_backward + passed
        ends[0] = ends[0][0], ends[0][1] + table
        return StageSeconds((layer, backward), tuple(ends), self._split(tokens, backward))

    def _split(self, tokens: float, backward: float) -> tuple[float, float]:
        """B and W of a layer whose whole backward takes so long.

        W reads once more what is kept for it, and gathers what sequence parallelism has cut beneath no other product.
        Collectives of B are in `backward`, which hides none.
        """
        spec, hardware, tp = self.spec, self.hardware, self.layout.tp
        product = 2 * spec.layer_parameters * (tokens + hardware.half_rate_tokens) / (tp * hardware.flops)
        if self.kernels:
            sums = spec.layer_parameters / tp * self.kernels.gradient_sum_bytes / hardware.memory_bandwidth
            product = max(product, sums)
        read = self.memory.split_layer_bytes(tokens) / hardware.memory_bandwidth
        gathered = 0.0
        if self.memory.cuts_tokens:
            gathered = GATHERS * self._tensor_ranks.gather_seconds(self._message_bytes(tokens))
        launches = 0.0 if self._launched_ahead else LAUNCHES * hardware.launch_seconds
        return backward - product, max(product + read, launches) + gathered

    def optimizer_step_seconds(self, place: int | None = None) -> float:
        """After the last micro-batch of a mini-batch: gradients summed over dp, Adam, weights gathered (ZeRO-1).

        Ranks go tensor, pipeline, data: replicas are tp x pp ranks apart. On a CPU Adam is bound by memory too.
        """
        if not (kernels := self.kernels):
            return 0.0
        layout = self.layout
        replicas = RankGroup(self.hardware, layout.dp, stride=layout.tp * layout.pp)
        sent = self.memory.gradient_bytes(place), self.memory.weights_bytes(place)
        exchanged = sum(map(replicas.gather_seconds, sent))
        per_parameter = kernels.zero_bytes + kernels.adam_bytes / layout.dp
        updated = self.memory.parameters(place) * per_parameter / self.hardware.memory_bandwidth
        return (updated + exchanged) * self.hardware.step_waiting

    def send_seconds(self, tokens: float) -> float:
        """One hidden state to the next stage, each tensor rank to its peer; 0 without a pipeline.

        A pipeline is tp x pp ranks in a row: where these do not lie within one machine its slowest hop counts.
        """
        devices, ranks = self.hardware.devices_per_node, self.layout.tp * self.layout.pp
        if self.layout.pp == 1:
            return 0.0
        return send_seconds(self.hardware, self.memory.hidden_bytes(tokens), across=devices % ranks > 0)
