"""Compiles the kernels of drafts in a process of their own: every rank drafts, and would keep the compiler's memory."""

from __future__ import annotations

from typing import Any

from rlhfuse.base.kernel_cache import KernelGroup, compile_apart, tell_what_is_compiled
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs import layout_moves
from rlhfuse.decisions import weight_moves
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.bounds.window_rules import contradiction
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.ir.ranks import plain_cells
from rlhfuse.schedule.search.admission_rules import reached_by_rule
from rlhfuse.schedule.search.dispatch import list_operations


def compile_for_drafts() -> None:
    """Compile, unless this machine has them, the kernels that plans are drafted with; other ranks here wait for it."""
    kernels = (contradiction, list_operations, weight_moves.choose_rows, layout_moves.add_rows)
    compile_apart([KernelGroup(kernels, "rlhfuse.planning.draft_kernels")])


def run_kernels() -> None:
    """Bound, reach and move next to nothing, so that each kernel is in numba's cache afterwards."""
    problem = FusionProblem(1, (Pipeline("one", "one", (0,), 1, (1,), (2,), (1,)),))
    latency_bound(problem)
    reached_by_rule(problem, tries=1)
    sizes: dict[str, Any] = dict(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, mlp=8, vocab=16, context=16)
    spec = ModelSpec(architecture="llama", **sizes, eos_token_ids=(), tied_embeddings=True)
    alone = ParallelLayout(1, 1, 1)
    layout_moves.model_load(spec, alone, plain_cells(alone), alone, element_bytes=4, devices_per_node=1)


if __name__ == "__main__":
    tell_what_is_compiled()
    run_kernels()
