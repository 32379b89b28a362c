"""A call of RLHF's graph and its seconds in a layout, as REAL runs it (appendix A).

The batch is cut over dp replicas, then into passes, then into the micro-batches that a pipeline keeps in flight. A
pipeline of unequal stages with m micro-batches takes the sum of its stages + (m - 1) x its slowest stage, forward or,
for 1F1B, forward and backward together. Decoding keeps PP micro-batches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.forms.collectives import ring_gather_seconds
from rlhfuse.costs.forms.training import MicrobatchTokens

WEIGHT_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class ModelCall:
    """One model in one layout on a mesh of dp x tp x pp ranks."""

    model: AnalyticCost

    def generate_seconds(self, batch: float, prompt_tokens: int, output_tokens: int, passes: int = 1) -> float:
        """Generate `output_tokens` for each of `batch` prompts; `passes` go one after the other.

        Prefill draws the first token, each decode step one more.
        """
        pp = self.model.layout.pp
        sequences = batch / (self.model.layout.dp * passes * pp)
        tokens = sequences * prompt_tokens
        body = self._stages(self.model.layer_seconds(tokens, sequences), tokens, sequences)
        prefill = sum(body) + (pp - 1) * max(body)
        step = self.model.decode_layer_seconds(sequences, sequences * (prompt_tokens + output_tokens / 2))
        decode = pp * max(self._stages(step, sequences, sequences)) * (output_tokens - 1)
        return self.model.hardware.call_seconds + passes * (prefill + decode)

    def infer_seconds(self, batch: float, sample_tokens: int, passes: int = 1) -> float:
        """Forward over `batch` samples of `sample_tokens` with an output for every token."""
        pp = self.model.layout.pp
        sequences = batch / (self.model.layout.dp * passes * pp)
        tokens = sequences * sample_tokens
        stages = self._stages(self.model.layer_seconds(tokens, sequences), tokens, tokens)
        return self.model.hardware.call_seconds + passes * (sum(stages) + (pp - 1) * max(stages))

    def train_seconds(self, batch: float, sample_tokens: int, minibatches: int, microbatches: int) -> float:
        """`minibatches` optimizer steps over `batch` samples, each of `microbatches` per pipeline in 1F1B order."""
        sequences = batch / (self.model.layout.dp * minibatches * microbatches)
        tokens = sequences * sample_tokens
        costs = self.model.stage_costs(MicrobatchTokens(tokens, sequences, tokens))
        send = 2 * self.send_seconds(tokens)  # hidden states on, their gradients back
        stages = [1e-6 * (f + b) + send for f, b in zip(costs.forward, costs.backward)]
        step = sum(stages) + (microbatches - 1) * max(stages)
        return self.model.hardware.call_seconds + minibatches * (step + self.gradient_seconds())

    def gradient_seconds(self) -> float:
        """Once per step over the data-parallel group (ZeRO-1): gradients reduce-scattered, weights gathered."""
        layout = self.model.layout
        whole = self.model.memory.gradient_bytes() + self.model.memory.weights_bytes()
        return ring_gather_seconds(whole, layout.dp, link_bandwidth(self.model.hardware, layout.tp * layout.dp))

    def send_seconds(self, tokens: float) -> float:
        """Hidden states of `tokens` from one stage to the next, each tensor rank its share; 0 without a pipeline."""
        layout, machine = self.model.layout, self.model.hardware
        if layout.pp == 1:
            return 0.0
        volume = tokens * self.model.spec.hidden * self.model.element_bytes / layout.tp
        return volume / link_bandwidth(machine, layout.size)

    def weights_seconds(self) -> float:
        """Bringing this model's weights into its layout from another: each rank receives its part."""
        return self.model.memory.weights_bytes() / link_bandwidth(self.model.hardware, self.model.layout.size)

    def _stages(self, layer_seconds: float, tokens: float, outputs: float) -> list[float]:
        """Seconds of each stage over one micro-batch, the send to the next one included."""
        send = self.send_seconds(tokens)
        cut = self.model.layout.stage_layers(self.model.spec.layers)
        stages = [len(layers) * layer_seconds + send for layers in cut]
        stages[-1] += self.model.head_seconds(outputs)
        return stages


@dataclass(frozen=True)
class CallWork:
    """A call without a layout; `name` ends with Gen, Inf or Train.

    `microbatches` are passes of generation and inference, and of training multiply 2 x PP.
    """

    name: str
    spec: ModelSpec
    batch: int
    prompt_tokens: int
    output_tokens: int
    minibatches: int
    microbatches: int

    @property
    def trains(self) -> bool:
        return self.name.endswith("Train")

    @property
    def sample_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def on(self, layout: ParallelLayout, machine: HardwareSpec) -> ModelCall:
        """In bf16; training recomputes."""
        head, recompute = self.name.startswith(("Rew", "Critic")), "full" if self.trains else "none"
        return ModelCall(AnalyticCost(self.spec, layout, machine, WEIGHT_BYTES, head, recompute=recompute))

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


def link_bandwidth(machine: HardwareSpec, span: int) -> float:
    """Bytes/s per rank of one ring over `span` consecutive ranks, the first of them on a node's first device."""
    return machine.node_link_bandwidth if span <= machine.devices_per_node else machine.cross_link_bandwidth
