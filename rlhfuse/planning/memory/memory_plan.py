"""What a plan says of memory: phases of an iteration on the ranks that they fill most, beside what a rank may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.planning.memory.memory_budget import DEVICE_PARTS, MemoryBudget, OptimizerOffload, PhaseMemory

NEARLY_FULL = 0.95  # of the limit


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes where all samples are as long as they can become: micro-batches then have `microbatch_tokens`.

    `process_bytes` is what a rank's process takes of its `limit` beside the phases, host copies too unless the device
    has memory of its own. `keeps_generation`: its weights and KV cache stay on the device between iterations.
    """

    phases: tuple[PhaseMemory, ...]
    limit: float
    limit_source: str
    process_bytes: int
    own_memory: bool
    ranks_per_node: int
    microbatch_tokens: float
    keeps_generation: bool = False
    offload: OptimizerOffload | None = None  # None: the optimizer stays on the device
    communicators: int = 0  # bytes of `process_bytes`, assumed; older plans lack it

    @staticmethod
    def of(budget: MemoryBudget, activations: Sequence[float], ranks_per_node: int) -> MemoryPlan:
        """Memory with a schedule that holds up to so much on each node."""
        kept = budget.keeps_generation(activations)
        return MemoryPlan(
            (budget.with_generation_kept() if kept else budget).phases(activations),
            budget.limit,
            budget.limit_source,
            budget.process,
            budget.hardware.device.own_memory,
            ranks_per_node,
            budget.microbatch_tokens,
            kept,
            budget.offload,
            budget.communicators,
        )

    def needed_bytes(self, phase: PhaseMemory) -> int:
        """Part of the limit on the fullest rank."""
        return phase.device + self.process_bytes + (0 if self.own_memory else phase.host)

    def lines(self) -> tuple[str, ...]:
        """A table for people."""
        columns = (*DEVICE_PARTS, "host")
        lines = ["phase      " + "".join(f"{name:>12s}" for name in (*columns, "process", "needed", "of limit"))]
        for phase in self.phases:
            needed = self.needed_bytes(phase)
            shown = [readable_bytes(getattr(phase, name)) for name in columns]
            shown += [readable_bytes(self.process_bytes), readable_bytes(needed), f"{needed / self.limit:.1%}"]
            lines.append(f"{phase.phase:11s}" + "".join(f"{text:>12s}" for text in shown))
        host = "host copies count"
        if self.own_memory:
            node = readable_bytes(self.ranks_per_node * max(phase.host for phase in self.phases))
            host += f" for host memory alone: {node} on a node of {self.ranks_per_node} ranks"
            host += f"; communicators {readable_bytes(self.communicators)} of the process, assumed"
        return (*lines, f"limit {readable_bytes(self.limit)} ({self.limit_source}); {host}", *self.warnings())

    def warnings(self) -> tuple[str, ...]:
        """A line for each phase that fills more than NEARLY_FULL of the limit."""
        shares = {phase.phase: self.needed_bytes(phase) / self.limit for phase in self.phases}
        return tuple(
            f"warning: {phase} fills {share:.1%} of the limit, and fragmentation is not counted"
            for phase, share in shares.items()
            if share > NEARLY_FULL
        )
