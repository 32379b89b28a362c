"""Fit a Calibration to published timings, and hold one against them.

Errors are those of logarithms, so that a call of five seconds counts as much as one of five minutes, and those
above HUBER grow linearly only, so that a row that no constants explain does not bend the others. The fit is
coordinate descent over the logarithms of the constants with shrinking steps: deterministic, numpy-free, a second.

Knows nothing of how a run is planned.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Callable, Iterable, Sequence

from rlhfuse.simulator.cost import AnalyticCost
from rlhfuse.simulator.hardware import Calibration, data_sheets
from rlhfuse.simulator.model_call import ModelCall
from rlhfuse.simulator.real_tables import MINIBATCHES, OUTPUT_TOKENS, PROMPT_TOKENS, RealRow

HUBER = 0.1
# Constants that the tables determine, with the range in which a value is credible. The others (network and host
# links) hardly touch these rows and stay as assumed.
FITTED = {
    "gemm": (0.2, 0.8),
    "hbm": (0.4, 1.0),
    "node_link": (0.1, 1.0),
    "forward_layer_seconds": (1e-5, 5e-3),
    "decode_layer_seconds": (1e-5, 2e-3),
    "eager_decode_layer_seconds": (1e-4, 5e-3),
    "call_seconds": (1e-2, 10.0),
}


@dataclass(frozen=True)
class RowError:
    """A published row beside its prediction."""

    row: RealRow
    predicted: float

    @property
    def error(self) -> float:
        """Relative: 0.1 is 10% too slow."""
        return self.predicted / self.row.seconds - 1


def call_seconds(row: RealRow, calibration: Calibration, gpu: str = "h100") -> float:
    """What the cost model says about a row's call."""
    machine = calibration.reached(data_sheets()[gpu], captured_graphs=not row.eager)
    training = row.call.endswith("Train")
    call = ModelCall(AnalyticCost(row.spec, row.layout, machine, 2, row.scalar_head, recompute=training))
    if row.call == "ActorGen":
        return call.generate_seconds(row.batch, PROMPT_TOKENS, OUTPUT_TOKENS, passes=row.microbatches)
    tokens = PROMPT_TOKENS + OUTPUT_TOKENS
    if training:
        return call.train_seconds(row.batch, tokens, MINIBATCHES, 2 * row.layout.pp * row.microbatches)
    return call.infer_seconds(row.batch, tokens, passes=row.microbatches)


def compare(rows: Iterable[RealRow], calibration: Calibration) -> tuple[RowError, ...]:
    return tuple(RowError(row, call_seconds(row, calibration)) for row in rows)


def mean_error(errors: Sequence[RowError]) -> float:
    return sum(abs(one.error) for one in errors) / len(errors)


def fit_calibration(rows: Sequence[RealRow], start: Calibration, name: str, rounds: int = 60) -> Calibration:
    """The constants of FITTED that explain `rows` best, the others as in `start`."""
    best = replace(start, name=name, **{key: _clip(getattr(start, key), *FITTED[key]) for key in FITTED})

    def loss(candidate: Calibration) -> float:
        return sum(_huber(math.log(one.predicted / one.row.seconds)) for one in compare(rows, candidate))

    best_loss, step = loss(best), 0.5
    for _ in range(rounds):
        improved = False
        for key, (low, high) in FITTED.items():
            for factor in (math.exp(step), math.exp(-step)):
                candidate = replace(best, **{key: _clip(getattr(best, key) * factor, low, high)})
                candidate_loss = loss(candidate)
                if candidate_loss < best_loss - 1e-12:
                    best, best_loss, improved = candidate, candidate_loss, True
        step = step if improved else step / 2
        if step < 1e-3:
            break
    return best


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _huber(error: float) -> float:
    size = abs(error)
    return size * size / 2 if size <= HUBER else HUBER * (size - HUBER / 2)
