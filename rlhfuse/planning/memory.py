"""Memory of a rank in each phase of an iteration, in bytes, against what it may have.

The models that train stay in device memory; what the other phases need comes before they begin and goes when they end.
A phase is priced on its fullest rank, all samples as long as they can become. What training holds beside the
activations of its schedule is the static memory of the scheduling problem, whose cap is the limit of a rank
(paper section 5.2, constraint 3).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.analytic import AnalyticCost

SCORERS = ("reference_inference", "reward_inference", "critic_inference")
TRAINED = ("actor_train", "critic_train")
CGROUP = Path("/sys/fs/cgroup/memory.max")
DEVICE_PARTS = ("weights", "optimizer", "gradients", "activations", "kv", "buckets")
REMEDIES = {
    "moves": "use more tensor ranks for parallel.generation and parallel.inference",
    "generation": "lower rollout.kv_blocks_per_instance or use more tensor ranks for parallel.generation",
    "inference": "lower rollout.max_batched_tokens or use more tensor ranks for parallel.inference",
    "training": "raise fusion.actor_microbatches, set trainer.recompute=full or use more stages or tensor ranks",
}


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on one rank during one phase; `host` is host memory, all else device memory."""

    phase: str
    weights: int
    optimizer: int
    gradients: int
    activations: int
    kv: int
    buckets: int  # weights, or keys and values, in transfer
    host: int  # offloaded weights

    @property
    def device(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.activations + self.kv + self.buckets


@dataclass(frozen=True)
class MemoryBudget:
    """The phases moves, generation, inference and training, the last without its schedule's activations; bytes."""

    static: tuple[PhaseMemory, ...]
    hardware: HardwareSpec
    limit: float  # of one rank
    limit_source: str
    microbatch_tokens: float  # of the longest samples

    def phases(self, activations: float) -> tuple[PhaseMemory, ...]:
        """With a schedule that holds up to `activations` on a rank."""
        *others, training = self.static
        return (*others, replace(training, activations=training.activations + int(activations)))

    def needed(self, phase: PhaseMemory) -> int:
        """Part of `limit` that a phase takes; on a CPU host copies share it."""
        return phase.device + self.hardware.process_bytes + (phase.host if self.hardware.name == "cpu" else 0)

    def fullest(self, activations: float) -> PhaseMemory:
        return max(self.phases(activations), key=self.needed)

    @property
    def training_bytes(self) -> int:
        """Training's need beside the activations of its schedule."""
        return self.needed(self.static[-1])

    def check(self, activations: float, least: float, order: str) -> None:
        """Raise InputError unless a schedule with `activations`, called `order`, fits; `least`: of the leanest."""
        fullest = self.fullest(activations)
        needed = self.needed(fullest)
        if needed <= self.limit:
            return
        parts = [f"{name} {readable_bytes(getattr(fullest, name))}" for name in DEVICE_PARTS if getattr(fullest, name)]
        if self.hardware.name == "cpu":
            parts.append(f"host copies {readable_bytes(fullest.host)}")
        if self.hardware.process_bytes:
            parts.append(f"the process {readable_bytes(self.hardware.process_bytes)}")
        which, remedy = "", REMEDIES[fullest.phase]
        if fullest.phase == "training":
            smallest = self.training_bytes + int(least)
            which = f" with {order}" if activations > least else ""
            which += f"; the least of any schedule is {readable_bytes(smallest)}"
            if smallest <= self.limit:
                remedy = f"leave fusion.intra_stage on and fusion.schedule empty to search one that fits, {remedy}"
        raise InputError(
            f"memory: {fullest.phase} needs {readable_bytes(needed)} per rank ({', '.join(parts)}){which}, but a rank "
            f"of this {self.hardware.name} has {readable_bytes(self.limit)}; {remedy}, or set trainer.memory_limit_gb"
        )


def memory_budget(
    config: RunConfig,
    costs: Mapping[str, AnalyticCost],
    world_size: int,
    kv_capacity_bytes: float,
    samples_per_microbatch: float,
) -> MemoryBudget:
    """The budget of a run; `costs` has one entry per task, `kv_capacity_bytes` is C of a whole instance.

    Generation and scoring keep no activations for a backward: they hold the widest layer's of a batch, and the float32
    logits where there is a head, in generation those of the sequences that draw a token.
    """
    rollout, generation = config.rollout, costs["generation"]
    trained = [costs[task] for task in TRAINED if task in costs]
    scorers = [costs[task] for task in SCORERS if task in costs]
    resident = sum(cost.weights_bytes() for cost in trained)
    optimizer = sum(cost.optimizer_bytes() for cost in trained)
    offloaded = sum(cost.weights_bytes() for cost in scorers)
    critic = costs["critic_inference"].weights_bytes() if "critic_inference" in costs else 0
    copy, batched = generation.weights_bytes(), rollout.max_batched_tokens

    def phase(name: str, weights: int, **parts: float) -> PhaseMemory:
        held = dict(gradients=0, activations=0, kv=0, buckets=0) | {key: int(value) for key, value in parts.items()}
        return PhaseMemory(name, resident + weights, optimizer, host=offloaded, **held)

    buckets = min(config.fusion.bucket_mib << 20, max(copy, critic))
    decoding = generation.forward_bytes(batched, min(rollout.max_sequences_per_instance, batched))
    scoring = max((cost.forward_bytes(batched, batched) for cost in scorers), default=0)
    longest = samples_per_microbatch * (config.data.max_prompt_tokens + rollout.max_response_tokens)
    gradients = sum(cost.gradient_bytes() for cost in trained)
    passing = max(cost.passing_bytes(longest) for cost in trained)
    static = (
        phase("moves", copy + critic, buckets=buckets),
        phase("generation", copy, activations=decoding, kv=kv_capacity_bytes / generation.layout.tp),
        phase("inference", offloaded, activations=scoring),
        phase("training", 0, gradients=gradients, activations=passing),
    )
    return MemoryBudget(static, generation.hardware, *memory_limit(config, generation.hardware, world_size), longest)


def memory_limit(config: RunConfig, hardware: HardwareSpec, world_size: int) -> tuple[float, str]:
    """Bytes that one rank may use, and where the number is from. The ranks of a CPU node, or of a GPU, share them."""
    if config.trainer.memory_limit_gb:
        return config.trainer.memory_limit_gb * 1e9, "trainer.memory_limit_gb"
    if hardware.name != "cpu" and not config.trainer.share_gpu:
        return hardware.memory_bytes, f"of one {hardware.name}"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    whole, owner = (machine_bytes(), "machine") if hardware.name == "cpu" else (hardware.memory_bytes, hardware.name)
    return whole / ranks, f"this {owner}'s {readable_bytes(whole)} / {ranks} ranks"


def machine_bytes() -> int:
    """Memory of this machine, or of the container that this process is in."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = CGROUP.read_text().strip() if CGROUP.exists() else "max"
    return total if allowed == "max" else min(total, int(allowed))


def readable_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
