"""What recording decode steps as CUDA graphs takes of a run: as many shapes as a generation instance decodes in."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfuse.planning.candidate import Candidate
from rlhfuse.tasks.decode_shapes import shapes_of_generation


@dataclass(frozen=True)
class GraphCapture:
    """Once in a run where generation is kept, else in every iteration."""

    shapes: int
    shape_seconds: float
    measured: bool  # by an earlier run, else estimated
    each_iteration: bool

    @property
    def seconds(self) -> float:
        return self.shapes * self.shape_seconds

    def __str__(self) -> str:
        source, when = "measured" if self.measured else "estimated", "in the first iteration alone"
        if self.each_iteration:
            when = "in every iteration"
        return (
            f"recording decode steps of {self.shapes} shapes as CUDA graphs takes {self.seconds:.3g} s {when}: "
            f"{self.shape_seconds * 1e3:.3g} ms each, {source}"
        )


def graph_capture(draft: Candidate, kept: bool) -> GraphCapture | None:
    """None where nothing is recorded. Samples that wait, or a tail of another instance, may add shapes."""
    config, estimated, limits = draft.run.config, draft.analytic["generation"], draft.generation.limits
    if not (config.rollout.cuda_graphs and estimated.capture_seconds()):
        return None
    tokens = range(limits.max_prompt_tokens + 1, limits.longest)
    sizes = estimated.spec.context, limits.block_tokens, limits.max_sequences
    shapes = shapes_of_generation(draft.batch.samples_per_instance, tokens, *sizes)
    measured = draft.costs.capture if config.fusion.profile else 0.0
    return GraphCapture(shapes, measured or estimated.capture_seconds(), bool(measured), not kept)
