"""What the work of a planned run takes, as straight lines: the file of trainer.pace for a run of smaller models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

from rlhfuse.costs.fits import Line
from rlhfuse.costs.forms.training import MicrobatchTokens, StageSeconds
from rlhfuse.costs.paced import PacedCost, TrainingPrice
from rlhfuse.costs.table import CostTable
from rlhfuse.planning.candidate import Candidate
from rlhfuse.planning.price import weight_moves
from rlhfuse.planning.training.training_problem import equal_microbatch

PARTS = (0.25, 0.5, 1.0, 2.0)  # of a usual size: where a line is fitted to seconds


def paced_cost_of(draft: Candidate) -> PacedCost:
    """The prices of a plan's run, for the lengths that it knows or assumes."""
    lengths, batch = draft.inputs.lengths.samples, draft.batch
    sequences = min(batch.samples_per_instance, draft.generation.limits.max_sequences)
    token_bytes = int(draft.generation.limits.kv_bytes_per_token)
    moves, training = {move.model: move.seconds for move in weight_moves(draft)}, {}
    for task in (task for task in draft.tasks if task.training):
        analytic, rung, share = draft.analytic[task.name], draft.training.likeliest, draft.ranks.shape.share(task.role)
        micro = equal_microbatch(draft.inputs.drawn, batch, rung, share)
        cut = tuple(map(len, analytic.layout.stage_layers(analytic.spec.layers)))
        step = draft.costs.steps.get(task.role, analytic.optimizer_step_seconds())
        seconds = partial(draft.costs.stage_seconds, task.role, analytic)
        training[str(task.role)] = training_price(seconds, cut, micro, step, moves[task.role])
    shapes = {str(role): f"{spec.layers}x{spec.hidden}" for role, spec in draft.run.specs.items()}
    learners = "/".join([*(shapes[role] for role in training), "-"][:2])
    models = f"{learners} on {draft.run.world_size} {draft.inputs.hardware.name}"
    usual = sum(lengths.prompt) / len(lengths), lengths.median_context
    generation = generation_lines(draft.costs, sequences, *usual, draft.generation.limits.score_tokens, token_bytes)
    return PacedCost(models=models, token_bytes=token_bytes, training=training, **generation)


def generation_lines(
    costs: CostTable, sequences: int, prompt: float, context: float, score_tokens: int, token_bytes: int
) -> dict[str, Any]:
    """The fields of a MeasuredCost, of an instance that decodes up to so many `sequences` at the same time.

    `prompt` and `context`: usual tokens of one; `score_tokens`: of a pack, at most.
    """
    batches = sorted({max(1, round(part * sequences)) for part in (0.0, 0.25, 0.5, 1.0)})
    steps = [(batch, batch * part * context) for batch, part in product(batches, PARTS)]
    prefills = [(count * part * prompt, count) for count, part in product(batches, PARTS)]
    packs = [(part * score_tokens, part * score_tokens / each) for part, each in product(PARTS, (context / 2, context))]
    moved = [(part * context * token_bytes,) for part in PARTS]
    return {
        "decode": _line(costs.decode_step_seconds, steps),
        "prefill": _line(costs.prefill_seconds, prefills),
        "score": _line(costs.score_seconds, packs),
        "migration": _line(costs.migration_seconds, moved),
        "swap_in": costs.swap_in,
        "meeting": 0.0,
        "release": 0.0,
    }


def training_price(
    seconds: Callable[[MicrobatchTokens], StageSeconds],
    cut: Sequence[int],
    micro: MicrobatchTokens,
    step: float,
    move: float,
) -> TrainingPrice:
    """Prices of stages of so many layers, around a usual micro-batch; `seconds`: of a micro-batch."""
    each = [seconds(MicrobatchTokens(*(part * count for count in micro))).of(cut) for part in PARTS]
    stages = []
    for stage in range(len(cut)):
        forward, backward = zip(*(seconds[stage] for seconds in each))
        tokens = [(part * micro.tokens,) for part in PARTS]
        stages.append((Line.fit(tokens, forward), Line.fit(tokens, backward)))
    return TrainingPrice(tuple(stages), step, move)


def _line(price: Callable[..., float], points: Iterable[tuple[float, ...]]) -> Line:
    points = list(points)
    return Line.fit(points, [price(*point) for point in points])
