"""A cost table as few arrays and numbers, for a compiled kernel: the parts of all its forms, and a table by batch.

Few: a kernel counts the references of each array that it passes on.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from rlhfuse.costs.forms import form
from rlhfuse.costs.forms.form import DECODE_ROW, PART, GridPart, records
from rlhfuse.costs.table import CostTable


class CostNumbers(NamedTuple):
    """All that a simulation asks of a cost table; seconds."""

    parts: np.ndarray  # of PART: those of a decode step, of a prefill from `prefill` on, and so on
    points: np.ndarray  # of grids
    decode_rows: np.ndarray  # of DECODE_ROW, by batch
    prefill: int
    score: int
    transfer: int
    least_step: float  # of one sequence without context or guesses: what prefills beside a step do not pay again
    swap_in: float
    barrier: float
    release: float
    reward_seconds: float
    reward_at_once: int  # calls of one worker; 0 without a reward function


def cost_numbers(costs: CostTable, most: int) -> CostNumbers:
    """What a simulation asks of `costs`, for batches up to `most`."""
    parts, points = [], []
    asked = costs.decode, costs.prefill, costs.score, costs.transfer
    for own in asked:
        moved = (p._replace(start=p.start + len(points)) if isinstance(p, GridPart) else p for p in own.parts)
        parts += moved
        points += own.points
    call, alone = costs.reward, costs.decode_row(1)
    return CostNumbers(
        records(PART, parts),
        np.array(points, np.float64),
        records(DECODE_ROW, [costs.decode_row(batch) for batch in range(most + 1)]),
        *accumulate(len(own.parts) for own in asked[:3]),
        least_step=float(costs.decode_step_seconds(1, 0.0) * alone.tokens - alone.guessing),
        swap_in=float(costs.swap_in),
        barrier=float(costs.meeting),
        release=float(costs.release),
        reward_seconds=float(call.seconds) if call else 0.0,
        reward_at_once=call.at_once if call else 0,
    )


@register_jitable(error_model="numpy", _nrt=False)
def decode_seconds(c, batch, context_tokens):
    """Seconds of a decode step of CostNumbers `c`."""
    return form.decode_seconds(c.parts[0], c.points, c.decode_rows[batch], float(batch), context_tokens)


@register_jitable(error_model="numpy", _nrt=False)
def prefill_seconds(c, tokens, sequences):
    """Seconds of a prefill."""
    return form.packed_seconds(c.parts, c.prefill, c.score, c.points, float(tokens), float(sequences))


@register_jitable(error_model="numpy", _nrt=False)
def score_seconds(c, tokens, sequences):
    """Seconds in which all models score a pack."""
    return form.packed_seconds(c.parts, c.score, c.transfer, c.points, float(tokens), float(sequences))


@register_jitable(error_model="numpy", _nrt=False)
def transfer_seconds(c, kv_bytes):
    """Seconds of a transfer."""
    return form.transfer_seconds(c.parts, c.transfer, len(c.parts), c.points, kv_bytes)
