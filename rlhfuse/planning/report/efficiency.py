"""What part of a GPU's data sheet a plan reaches: training of its arithmetic, decoding of its memory's bandwidth.

Where the rest goes is told by terms of the cost model, so that a reader can check each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.flops import IterationFlops
from rlhfuse.costs.hardware import data_sheets
from rlhfuse.planning.candidate import Candidate
from rlhfuse.planning.rooflines import optimizer_step_seconds
from rlhfuse.planning.training.training_problem import TICK_SECONDS
from rlhfuse.schedule.rules.builders import pipeline_work
from rlhfuse.simulator.lengths import SampleLengths


@dataclass(frozen=True)
class TrainingUse:
    """Seconds of one rank's training per iteration, mean over ranks; they add up.

    `useful`: the models' FLOPs at the data sheet's rate; `products`: what the same products take longer at the rate
    reached; `other`: other kernels, all-reduces, layers and logits run again; `idle`: bubbles, unequal stages and
    micro-batches; `steps`: optimizer steps, gradients and weights on their way over dp.
    """

    useful: float
    products: float
    other: float
    idle: float
    steps: float

    @property
    def seconds(self) -> float:
        return self.useful + self.products + self.other + self.idle + self.steps

    @property
    def mfu(self) -> float:
        return self.useful / self.seconds

    def __str__(self) -> str:
        parts = {
            "useful": self.useful,
            "products below the data sheet's rate": self.products,
            "other kernels, all-reduces, what runs again": self.other,
            "bubbles, unequal stages and micro-batches": self.idle,
            "optimizer steps": self.steps,
        }
        return ", ".join(f"{seconds / self.seconds:.1%} {what}" for what, seconds in parts.items())


@dataclass(frozen=True)
class DecodeUse:
    """One decode step of one rank in the middle of generation: bytes that it must read, and its seconds by term."""

    bytes: float  # weights of layers and output layer, keys and values
    seconds: float
    launches: float  # seconds of these
    all_reduces: float
    logits: float  # written, and read by the sampler

    def __str__(self) -> str:
        parts = {"launches": self.launches, "all-reduces": self.all_reduces, "logits to the sampler": self.logits}
        rest = self.seconds - sum(parts.values())
        told = ", ".join(f"{seconds * 1e3:.2g} ms {what}" for what, seconds in parts.items())
        return f"{rest * 1e3:.2f} ms weights, keys and values, {told}"


@dataclass(frozen=True)
class Efficiency:
    """Use that a plan makes of GPUs with a data sheet."""

    ranks: int
    peak_flops: float  # of one rank, as printed
    bandwidth: float  # of its memory, as printed: bytes/s
    training_flops: float  # of an iteration, all ranks together
    decode_sequences: int  # of an instance
    decode_context_tokens: float  # of each
    product_share: float  # of the data sheet's rate that products reach
    memory_share: float
    training: TrainingUse
    decode: DecodeUse

    def lines(self) -> tuple[str, ...]:
        """For people."""
        train, decode = self.training, self.decode
        step = f"{self.decode_sequences} sequences at {self.decode_context_tokens:.0f} tokens each"
        rates = f"products {self.product_share:.2f} and memory {self.memory_share:.2f} of the data sheet's"
        return (
            f"training {train.mfu:.1%} MFU, decode {self.hbm_share:.2f} of HBM: {rates}",
            f"MFU = {self.training_flops:.4g} FLOPs / ({self.ranks} ranks x {self.peak_flops:.4g} FLOP/s x "
            f"{train.seconds:.4g} s): {train}",
            f"of HBM = {decode.bytes:.4g} bytes / ({self.bandwidth:.4g} bytes/s x {decode.seconds * 1e3:.4g} ms), "
            f"a step of {step}: {decode}",
        )

    @property
    def hbm_share(self) -> float:
        """Bytes that a step must read, as a part of what the data sheet's bandwidth would in its seconds."""
        return self.decode.bytes / (self.bandwidth * self.decode.seconds)


def efficiency(draft: Candidate, training_seconds: float) -> Efficiency | None:
    """Efficiency of a plan that trains for `training_seconds` an iteration; None without a data sheet."""
    sheet, hardware = data_sheets().get(draft.inputs.hardware.name), draft.inputs.hardware
    if sheet is None:
        return None
    config, count = draft.run.config, draft.batch.optimizer_steps
    lengths = SampleLengths.joined(draft.inputs.lengths.trained or (draft.inputs.lengths.samples,))
    passes = IterationFlops.of(draft.specs, config.trained(), (), (), draft.batch.epochs * lengths.trained)
    flops = sum(passes.training.values()) * draft.batch.samples / len(lengths)
    useful, steps = flops / (draft.world_size * sheet.flops), count * optimizer_step_seconds(draft.analytic)
    busy, reached = count * _busy_seconds(draft), useful * sheet.flops / hardware.flops
    training = TrainingUse(useful, reached - useful, busy - reached, training_seconds - steps - busy, steps)
    shares = hardware.flops / sheet.flops, hardware.memory_bandwidth / sheet.memory_bandwidth
    decode, printed = _decode_use(draft, draft.analytic["generation"]), (sheet.flops, sheet.memory_bandwidth)
    return Efficiency(draft.world_size, *printed, flops, *_decoding(draft), *shares, training, decode)


def _busy_seconds(draft: Candidate) -> float:
    """Seconds of work of one mini-batch, mean over ranks; a rank of a merged stage is busy with its own alone.

    With even micro-batches: what a plan's are above the mean stands for waiting.
    """
    work, ticks = replace(draft.work, drawn=replace(draft.inputs.drawn, even=True)), 0.0
    for rung, share in draft.training.shares.items():
        for pipeline in work.problem(rung, draft.training.split.models).pipelines:
            ticks += share * pipeline.microbatches * pipeline_work(pipeline) / draft.ranks.merge(pipeline.name)
    return ticks * TICK_SECONDS / draft.ranks.shape.nodes


def _decoding(draft: Candidate) -> tuple[int, float]:
    """Sequences that an instance decodes at the same time, and tokens of each when half of its response is there."""
    lengths = draft.inputs.lengths.samples
    sequences = min(draft.batch.samples_per_instance, draft.generation.limits.max_sequences)
    return sequences, (sum(lengths.prompt) + sum(lengths.output) / 2) / len(lengths)


def _decode_use(draft: Candidate, cost: AnalyticCost) -> DecodeUse:
    spec, (sequences, context) = cost.spec, _decoding(draft)
    weights = spec.layers * spec.layer_parameters + spec.embedding_parameters
    return DecodeUse(
        weights * cost.element_bytes / cost.layout.tp + sequences * context * cost.memory.kv_bytes_per_token(),
        cost.decode_step_seconds(sequences, sequences * context),
        spec.layers * cost.hardware.decode_layer_seconds,
        spec.layers * cost.decode_all_reduce_seconds(sequences),
        cost.sampler_seconds(sequences),
    )
