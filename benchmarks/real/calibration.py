"""Fit a Calibration to published timings, and hold one against them.

Errors are those of logarithms, so that a call of five seconds counts as much as one of five minutes, and those
above HUBER grow linearly only, so that a row that no constants explain does not bend the others. The fit is
coordinate descent over the logarithms of the constants with shrinking steps: deterministic, a few seconds.

Knows nothing of how a run is planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from real.call_graph import GraphCall, graph_seconds
from real.model_call import ModelCall
from real.tables import MINIBATCHES, OUTPUT_TOKENS, PROMPT_TOKENS, RealRow

from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.hardware import ASSUMED, Calibration, data_sheets

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
# Where the descent begins. A floor that no row touches has no slope, so both floors begin high.
START = replace(ASSUMED, name="start", forward_layer_seconds=1e-3, decode_layer_seconds=2e-4, call_seconds=1.0)


@dataclass(frozen=True)
class RowError:
    """A published row beside its prediction."""

    row: RealRow
    predicted: float

    @property
    def error(self) -> float:
        """Relative: 0.1 is 10% too slow."""
        return self.predicted / self.row.seconds - 1


def model_call(row: RealRow, calibration: Calibration) -> ModelCall:
    """The row's model in its layout, in bf16 on H100s."""
    machine = calibration.reached(data_sheets()["h100"], captured_graphs=not row.eager)
    training = row.call.endswith("Train")
    return ModelCall(AnalyticCost(row.spec, row.layout, machine, 2, row.scalar_head, recompute=training))


def predicted_seconds(row: RealRow, calibration: Calibration) -> float:
    """What the cost model says about a row's call."""
    call = model_call(row, calibration)
    if row.call == "ActorGen":
        return call.generate_seconds(row.batch, PROMPT_TOKENS, OUTPUT_TOKENS, passes=row.microbatches)
    tokens = PROMPT_TOKENS + OUTPUT_TOKENS
    if row.call.endswith("Train"):
        return call.train_seconds(row.batch, tokens, MINIBATCHES, 2 * row.layout.pp * row.microbatches)
    return call.infer_seconds(row.batch, tokens, passes=row.microbatches)


def compare(rows: Iterable[RealRow], calibration: Calibration) -> tuple[RowError, ...]:
    return tuple(RowError(row, predicted_seconds(row, calibration)) for row in rows)


def end_to_end_seconds(rows: Sequence[RealRow], calibration: Calibration, eager: bool = False) -> float:
    """One iteration of a table, its calls placed by Algorithm 1, weights moved where a model changes its layout.

    `rows`: of one table. Generation comes first, then the three inferences, then both trainings, each where its
    devices are free.
    """
    chosen = {row.call: row for row in rows if row.call != "ActorGen" or row.eager == eager}
    moves = {name: model_call(chosen[name], calibration).weights_seconds() for name in ("ActorGen", "CriticInf")}
    if chosen["ActorGen"].layout == chosen["ActorTrain"].layout:
        moves["ActorGen"] = 0.0
    if chosen["CriticInf"].layout == chosen["CriticTrain"].layout:
        moves["CriticInf"] = 0.0
    calls = []
    for name, parents in _PARENTS.items():
        seconds = predicted_seconds(chosen[name], calibration) + moves.get(name, 0.0)
        calls.append(GraphCall(name, chosen[name].nodes, seconds, parents))
    return graph_seconds(calls)


_PARENTS = {
    "ActorGen": (),
    **dict.fromkeys(("RewInf", "RefInf", "CriticInf"), ("ActorGen",)),
    **dict.fromkeys(("CriticTrain", "ActorTrain"), ("RewInf", "RefInf", "CriticInf")),
}


def mean_error(errors: Sequence[RowError]) -> float:
    return sum(abs(one.error) for one in errors) / len(errors)


def fit_loss(rows: Sequence[RealRow], calibration: Calibration) -> float:
    """What the fit minimises."""
    return sum(_huber(math.log(one.predicted / one.row.seconds)) for one in compare(rows, calibration))


def fit_calibration(rows: Sequence[RealRow], name: str, start: Calibration = START, rounds: int = 100) -> Calibration:
    """The constants of FITTED that explain `rows` best, the others as in `start`."""

    def loss(candidate: Calibration) -> float:
        return fit_loss(rows, candidate)

    best = replace(start, name=name)
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
    return replace(best, **{key: float(f"{getattr(best, key):.4g}") for key in FITTED})


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _huber(error: float) -> float:
    size = abs(error)
    return size * size / 2 if size <= HUBER else HUBER * (size - HUBER / 2)
