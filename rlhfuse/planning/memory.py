"""What a rank holds in each phase of an iteration, in bytes.

    moves       the generation copy is filled, then the critic's for scoring, which goes on to host memory
    generation  the generation copy and the KV cache
    inference   the models that score, out of host memory
    training    gradients and activations

Weights and optimizer of the models that train stay in device memory throughout; everything else is released before
the next phase takes what it needs. On a CPU host memory and device memory are the same. A phase is priced on its
fullest rank; what a process holds without any model, interpreter and libraries, is not counted.

Knows nothing of time. Activations come from the schedule's peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfuse.costs.analytic import AnalyticCost

SCORERS = ("reference_inference", "reward_inference", "critic_inference")
TRAINED = ("actor_train", "critic_train")


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on one rank during one phase; `host` is host memory, all else device memory."""

    phase: str
    weights: int
    optimizer: int
    gradients: int
    activations: int
    kv: int
    buckets: int  # weights, or keys and values, on their way
    host: int

    @property
    def device(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.activations + self.kv + self.buckets


def memory_by_phase(
    costs: Mapping[str, AnalyticCost],
    kv_capacity_bytes: float,
    training_activations: float,
    batched_tokens: int,
    sequences: int,
    bucket_bytes: int,
) -> tuple[PhaseMemory, ...]:
    """The four phases. `costs` has one entry per task of the run; `kv_capacity_bytes` is C of a whole instance.

    `training_activations`: peak of the schedule on one rank. Generation and scoring keep no activations for a
    backward: they hold the widest layer's of `batched_tokens`, and the float32 logits where there is a head, in
    generation those of the `sequences` that draw a token.
    """
    trained = [costs[task] for task in TRAINED if task in costs]
    scorers = [costs[task] for task in SCORERS if task in costs]
    generation = costs["generation"]
    resident = sum(cost.weights_bytes() for cost in trained)
    optimizer = sum(cost.optimizer_bytes() for cost in trained)
    offloaded = sum(cost.weights_bytes() for cost in scorers)
    critic = costs["critic_inference"].weights_bytes() if "critic_inference" in costs else 0
    copy = generation.weights_bytes()

    def phase(name: str, weights: int, **parts: float) -> PhaseMemory:
        held = dict(gradients=0, activations=0, kv=0, buckets=0) | {key: int(value) for key, value in parts.items()}
        return PhaseMemory(name, resident + weights, optimizer, host=offloaded, **held)

    bucket = min(bucket_bytes, max(copy, critic))
    decoding = generation.forward_bytes(batched_tokens, min(sequences, batched_tokens))
    scoring = max((cost.forward_bytes(batched_tokens, batched_tokens) for cost in scorers), default=0)
    return (
        phase("moves", copy + critic, buckets=bucket),
        phase("generation", copy, activations=decoding, kv=kv_capacity_bytes / generation.layout.tp),
        phase("inference", offloaded, activations=scoring),
        phase(
            "training", 0, gradients=sum(cost.gradient_bytes() for cost in trained), activations=training_activations
        ),
    )


def readable_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
