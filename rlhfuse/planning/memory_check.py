"""Whether a run's phases fit: what they need against what a rank may have.

A GPU has what its hardware says. On a CPU the ranks of a node share the machine's memory, host copies included, and
every process holds interpreter and libraries besides. `trainer.memory_limit_gb` is the last word on both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.decisions.layouts import BatchArithmetic
from rlhfuse.errors import InputError
from rlhfuse.planning.memory import TRAINED, PhaseMemory, memory_by_phase, readable_bytes
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.schedule import Schedule

CGROUP = Path("/sys/fs/cgroup/memory.max")


def run_memory(
    config: RunConfig,
    costs: Mapping[str, AnalyticCost],
    batch: BatchArithmetic,
    kv_capacity_bytes: float,
    full_length: Schedule,
) -> tuple[PhaseMemory, ...]:
    """The phases of a run whose samples are all as long as they can become; `full_length` is priced for these."""
    longest = longest_microbatch(config, batch)
    activations = evaluate(full_length).peak_memory
    activations += max(cost.passing_bytes(longest) for task, cost in costs.items() if task in TRAINED)
    return memory_by_phase(
        costs,
        kv_capacity_bytes,
        activations,
        config.rollout.max_batched_tokens,
        config.rollout.max_sequences_per_instance,
        config.fusion.bucket_mib << 20,
    )


def longest_microbatch(config: RunConfig, batch: BatchArithmetic) -> float:
    """Tokens of a micro-batch whose samples are all as long as they can become."""
    return batch.samples_per_microbatch * (config.data.max_prompt_tokens + config.rollout.max_response_tokens)


def memory_limit(config: RunConfig, hardware: HardwareSpec, world_size: int) -> float:
    """Bytes that one rank may use."""
    if config.trainer.memory_limit_gb:
        return config.trainer.memory_limit_gb * 1e9
    if hardware.name != "cpu":
        return hardware.memory_bytes
    return machine_bytes() / _ranks_of_machine(world_size)


def memory_limit_source(config: RunConfig, hardware: HardwareSpec, world_size: int) -> str:
    """Where `memory_limit` is from, for people."""
    if config.trainer.memory_limit_gb:
        return "trainer.memory_limit_gb"
    if hardware.name != "cpu":
        return f"of one {hardware.name}"
    return f"this machine's {readable_bytes(machine_bytes())} / {_ranks_of_machine(world_size)} ranks"


def _ranks_of_machine(world_size: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def machine_bytes() -> int:
    """Memory of this machine, or of the container that this process is in."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = CGROUP.read_text().strip() if CGROUP.exists() else "max"
    return total if allowed == "max" else min(total, int(allowed))


def needed_bytes(phase: PhaseMemory, hardware: HardwareSpec) -> int:
    """What a rank needs of the memory that `memory_limit` is about."""
    return phase.device + hardware.process_bytes + (phase.host if hardware.name == "cpu" else 0)


def refuse_unless_fits(phases: Sequence[PhaseMemory], hardware: HardwareSpec, limit: float) -> None:
    """Raise InputError naming the fullest phase, what it is made of, and what would make it smaller."""
    fullest = max(phases, key=lambda phase: needed_bytes(phase, hardware))
    needed = needed_bytes(fullest, hardware)
    if needed <= limit:
        return
    names = ("weights", "optimizer", "gradients", "activations", "kv", "buckets")
    parts = [f"{name} {readable_bytes(getattr(fullest, name))}" for name in names if getattr(fullest, name)]
    if hardware.name == "cpu":
        parts.append(f"host copies {readable_bytes(fullest.host)}")
    if hardware.process_bytes:
        parts.append(f"the process {readable_bytes(hardware.process_bytes)}")
    raise InputError(
        f"memory: {fullest.phase} needs {readable_bytes(needed)} per rank ({', '.join(parts)}), but a rank of this "
        f"{hardware.name} has {readable_bytes(limit)}; {REMEDIES[fullest.phase]}, or set trainer.memory_limit_gb"
    )


REMEDIES = {
    "moves": "use more tensor ranks for parallel.generation and parallel.inference",
    "generation": "lower rollout.kv_blocks_per_instance or use more tensor ranks for parallel.generation",
    "inference": "lower rollout.max_batched_tokens or use more tensor ranks for parallel.inference",
    "training": "set trainer.recompute=full, raise fusion.actor_microbatches or use more stages",
}
