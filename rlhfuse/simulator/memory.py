"""What a rank holds in each phase of an iteration, in bytes.

Weights and optimizer of the two trained models stay in device memory throughout; the actor's generation copy,
the KV cache and the three scoring models come and go; frozen weights, and the critic's for scoring, are parked
in host memory. A phase is priced on its fullest rank.

Knows nothing of time. Activations come from the schedule's peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from rlhfuse.simulator.cost import AnalyticCost

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
    host: int

    @property
    def device(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.activations + self.kv


def memory_by_phase(
    costs: Mapping[str, AnalyticCost], kv_capacity_bytes: float, training_activations: float, score_tokens: int
) -> tuple[PhaseMemory, ...]:
    """The three phases. `costs` has one entry per task of the run; `kv_capacity_bytes` is C of a whole instance.

    `training_activations`: peak of the schedule on one rank. Scoring keeps no activations for a backward; it holds
    the widest layer's of one packed batch of `score_tokens`, and the float32 logits where there is a head.
    """
    trained = [costs[task] for task in TRAINED if task in costs]
    scorers = [costs[task] for task in SCORERS if task in costs]
    trained_weights = sum(cost.weights_bytes() for cost in trained)
    optimizer = sum(cost.optimizer_bytes() for cost in trained)
    gradients = sum(cost.gradient_bytes() for cost in trained)
    parked = sum(cost.weights_bytes() for cost in scorers)
    generation = costs["generation"]
    scoring = max((_forward_bytes(cost, score_tokens) for cost in scorers), default=0)
    return (
        PhaseMemory(
            phase="generation",
            weights=trained_weights + generation.weights_bytes(),
            optimizer=optimizer,
            gradients=0,
            activations=int(generation.layer_activation_bytes(score_tokens)),
            kv=int(kv_capacity_bytes / generation.layout.tp),
            host=parked,
        ),
        PhaseMemory(
            phase="inference",
            weights=trained_weights + generation.weights_bytes() + parked,
            optimizer=optimizer,
            gradients=0,
            activations=scoring,
            kv=0,
            host=parked,
        ),
        PhaseMemory(
            phase="training",
            weights=trained_weights,
            optimizer=optimizer,
            gradients=gradients,
            activations=int(training_activations),
            kv=0,
            host=parked,
        ),
    )


def _forward_bytes(cost: AnalyticCost, tokens: int) -> int:
    logits = 0 if cost.scalar_head else tokens * cost.spec.vocab * 4 / cost.layout.tp
    return int(cost.layer_activation_bytes(tokens) + logits)


def readable_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
