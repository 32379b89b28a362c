"""What part of a GPU's data sheet a plan reaches: training of its arithmetic, decoding of its memory's bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfuse.costs.flops import IterationFlops
from rlhfuse.costs.hardware import data_sheets
from rlhfuse.planning.candidate import Candidate
from rlhfuse.simulator.lengths import SampleLengths


@dataclass(frozen=True)
class Efficiency:
    """Use that a plan makes of GPUs with a data sheet: of an iteration's training, and of a decode step of one rank in
    the middle of generation."""

    ranks: int
    peak_flops: float  # of one rank, as printed
    bandwidth: float  # of its memory, as printed: bytes/s
    training_flops: float  # of an iteration, all ranks together
    training_seconds: float  # of an iteration
    decode_sequences: int  # of an instance
    decode_context_tokens: float  # of each
    decode_bytes: float  # that a step must read: weights of layers and output layer, keys and values
    decode_seconds: float
    product_share: float  # of the data sheet's rate that products reach
    memory_share: float

    @property
    def mfu(self) -> float:
        return self.training_flops / (self.ranks * self.peak_flops * self.training_seconds)

    @property
    def hbm_share(self) -> float:
        """Bytes that a step must read, as a part of what the data sheet's bandwidth would in its seconds."""
        return self.decode_bytes / (self.bandwidth * self.decode_seconds)

    def lines(self) -> tuple[str, ...]:
        """For people."""
        step = f"{self.decode_sequences} sequences at {self.decode_context_tokens:.0f} tokens each"
        rates = f"products {self.product_share:.2f} and memory {self.memory_share:.2f} of the data sheet's"
        return (
            f"training {self.mfu:.1%} MFU, decode {self.hbm_share:.2f} of HBM: {rates}",
            f"MFU = {self.training_flops:.4g} FLOPs / ({self.ranks} ranks x {self.peak_flops:.4g} FLOP/s x "
            f"{self.training_seconds:.4g} s)",
            f"of HBM = {self.decode_bytes:.4g} bytes / ({self.bandwidth:.4g} bytes/s x "
            f"{self.decode_seconds * 1e3:.4g} ms), a step of {step}",
        )


def efficiency(draft: Candidate, training_seconds: float) -> Efficiency | None:
    """Efficiency of a plan that trains for `training_seconds` an iteration; None without a data sheet."""
    hardware, batch = draft.inputs.hardware, draft.batch
    if (sheet := data_sheets().get(hardware.name)) is None:
        return None
    lengths = SampleLengths.joined(draft.inputs.lengths.trained or (draft.inputs.lengths.samples,))
    passes = IterationFlops.of(draft.run.specs, draft.run.config.trained(), (), (), batch.epochs * lengths.trained)
    cost, generated = draft.analytic["generation"], draft.inputs.lengths.samples
    sequences = min(batch.samples_per_instance, draft.generation.limits.max_sequences)
    context = (sum(generated.prompt) + sum(generated.output) / 2) / len(generated)  # half of a response is there
    weights = cost.spec.layers * cost.spec.layer_parameters + cost.spec.embedding_parameters
    cache_bytes = sequences * context * cost.memory.kv_bytes_per_token()
    return Efficiency(
        ranks=draft.run.world_size,
        peak_flops=sheet.flops,
        bandwidth=sheet.memory_bandwidth,
        training_flops=sum(passes.training.values()) * batch.samples / len(lengths),
        training_seconds=training_seconds,
        decode_sequences=sequences,
        decode_context_tokens=context,
        decode_bytes=weights * cost.element_bytes / cost.layout.tp + cache_bytes,
        decode_seconds=cost.decode_step_seconds(sequences, sequences * context),
        product_share=hardware.flops / sheet.flops,
        memory_share=hardware.memory_bandwidth / sheet.memory_bandwidth,
    )
