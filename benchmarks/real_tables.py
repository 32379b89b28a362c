"""The cost model against the timings that REAL published (appendix Tables 2-6).

    python benchmarks/real_tables.py [--refit]

Every row beside its prediction, each table predicted with constants fitted to the other three, and whole iterations;
`planned` are the costs of a plan for GPUs, to which nothing was fitted: assumed constants and this project's kernels.
Errors of the fit are those of logarithms, so that a call of five seconds counts as much as one of five minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from harness import Figure, Measurement, options
from placements.call_graph import GraphCall, graph_seconds
from real.calls import ModelCall
from real.space import INFERENCES, CallWork
from real.tables import (
    BATCH,
    EAGER_END_TO_END,
    END_TO_END,
    RealRow,
    real_rows,
)

from rlhfuse.base.errors import run_program
from rlhfuse.costs.hardware import ASSUMED, REAL_H100, Calibration, data_sheets
from rlhfuse.costs.kernels import Kernels

HUBER = 0.1  # errors above grow linearly only, so that a row that no constants explain does not bend the others
FITTED = {  # with the range in which a value is credible; network and host links hardly touch these rows
    "gemm": (0.2, 0.8),
    "hbm": (0.4, 1.0),
    "node_link": (0.1, 1.0),
    "forward_layer_seconds": (1e-5, 5e-3),
    "decode_layer_seconds": (1e-5, 2e-3),
    "eager_decode_layer_seconds": (1e-4, 5e-3),
    "call_seconds": (1e-2, 10.0),
}
# where the descent begins: a floor that no row touches has no slope, so both floors begin high
START = replace(
    ASSUMED,
    name="start",
    forward_layer_seconds=1e-3,
    decode_layer_seconds=2e-4,
    call_seconds=1.0,
    collective_seconds=0.0,  # the floors hold these
    cross_collective_seconds=0.0,
)
PARENTS = {
    "ActorGen": (),
    **dict.fromkeys(INFERENCES, ("ActorGen",)),
    **dict.fromkeys(("CriticTrain", "ActorTrain"), INFERENCES),
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


def main() -> None:
    parser = options(__doc__, seed=False)
    parser.add_argument("--refit", action="store_true", help="fit the constants anew instead of the shipped ones")
    arguments = parser.parse_args()
    measurement, rows = Measurement("real_tables", arguments, timed=False), real_rows()
    calibration = fit_calibration(rows, REAL_H100.name) if arguments.refit else REAL_H100
    errors = compare(rows, calibration)
    head = ("table", "call", "layout", "#mbs", "published s", "predicted s", "error")
    measurement.table("rows", "Calls (* derived from what End2End grows by)", head, [cells(one) for one in errors])
    measurement.figure("mean_error", Figure(mean_error(errors)).at_most(0.10))
    measurement.figure("worst_error", Figure(max(abs(one.error) for one in errors)).at_most(0.35))
    measurement.figure("assumed.mean_error", mean_error(compare(rows, ASSUMED)))
    planned = compare(rows, ASSUMED, Kernels())
    measurement.figure("planned.mean_error", Figure(mean_error(planned)).at_most(0.15))
    for kind in ("Gen", "Inf", "Train"):
        own = [one for one in planned if one.row.call.endswith(kind) and not one.row.eager]
        measurement.figure(f"planned.{kind}.mean_error", mean_error(own))
    parts = []
    for table in BATCH:
        own, others = [row for row in rows if row.table == table], [row for row in rows if row.table != table]
        fitted = measurement.figure(f"{table}.mean_error", mean_error(compare(own, calibration))).value
        held = compare(own, fit_calibration(others, f"without {table}"))
        held_out = measurement.figure(f"{table}.held_out", mean_error(held)).value
        ends = []
        for eager, published in ((False, END_TO_END[table]), (True, EAGER_END_TO_END[table])):
            error = end_to_end_seconds(own, calibration, eager) / published - 1
            measurement.figure(f"{table}.{'eager' if eager else 'graphs'}.end_to_end_error", error)
            ends.append(f"{error:+.1%} of {published} s")
        parts.append([table, f"{fitted:.1%}", f"{held_out:.1%}", f"{max(abs(one.error) for one in held):.1%}", *ends])
    head = ("table", "mean error", "fitted to the others", "its worst row", "end to end", "without graphs")
    measurement.table("tables", "Tables", head, parts)
    terms = [
        [key, *(f"{mean_error(compare(rows, one)):.1%}" for one in taken_from_the_fit(key, calibration))]
        for key in (*FITTED, "decode_layer_seconds eager_decode_layer_seconds call_seconds")
    ]
    head = ("constant", "taken from the fit, others assumed", "assumed, others from the fit")
    measurement.table("terms", "Mean error of all rows: which constants of the fit matter", head, terms)
    measurement.facts(constants=asdict(calibration))
    measurement.finish()


def taken_from_the_fit(keys: str, fitted: Calibration) -> tuple[Calibration, Calibration]:
    """The assumed constants with `keys` of the fit, and the fit with `keys` as assumed."""
    names = keys.split()
    return (
        replace(ASSUMED, **{key: getattr(fitted, key) for key in names}),
        replace(fitted, **{key: getattr(ASSUMED, key) for key in names}),
    )


def cells(one: RowError) -> list[str]:
    row = one.row
    call, derived = row.call + (" without graphs" if row.eager else ""), "*" if row.derived else ""
    seconds = f"{row.seconds:.1f}{derived}", f"{one.predicted:.1f}"
    return [row.table, call, str(row.layout), str(row.microbatches), *seconds, f"{one.error:+.1%}"]


def model_call(row: RealRow, calibration: Calibration, kernels: Kernels | None = None) -> ModelCall:
    """The row's model in its layout on H100s."""
    machine = calibration.reached(data_sheets()["h100"], captured_graphs=not row.eager)
    return CallWork.of(row).on(row.layout, machine, kernels)


def predicted_seconds(row: RealRow, calibration: Calibration, kernels: Kernels | None = None) -> float:
    """What the cost model says about a row's call."""
    return CallWork.of(row).seconds(model_call(row, calibration, kernels))


def compare(rows: Iterable[RealRow], calibration: Calibration, kernels: Kernels | None = None) -> tuple[RowError, ...]:
    return tuple(RowError(row, predicted_seconds(row, calibration, kernels)) for row in rows)


def mean_error(errors: Sequence[RowError]) -> float:
    return sum(abs(one.error) for one in errors) / len(errors)


def end_to_end_seconds(rows: Sequence[RealRow], calibration: Calibration, eager: bool = False) -> float:
    """One iteration of a table, its calls placed by Algorithm 1, weights moved where a model changes its layout."""
    chosen = {row.call: row for row in rows if row.call != "ActorGen" or row.eager == eager}
    moves = {}
    for name, training in (("ActorGen", "ActorTrain"), ("CriticInf", "CriticTrain")):
        same = chosen[name].layout == chosen[training].layout
        moves[name] = 0.0 if same else model_call(chosen[name], calibration).weights_seconds()
    calls = [
        GraphCall(name, row.nodes, predicted_seconds(row, calibration) + moves.get(name, 0.0), PARENTS[name])
        for name, row in ((name, chosen[name]) for name in PARENTS)
    ]
    return graph_seconds(calls)


def fit_loss(rows: Sequence[RealRow], calibration: Calibration) -> float:
    """What the fit minimises."""
    return sum(huber(math.log(one.predicted / one.row.seconds)) for one in compare(rows, calibration))


def fit_calibration(rows: Sequence[RealRow], name: str, start: Calibration = START, rounds: int = 100) -> Calibration:
    """The constants of FITTED that explain `rows` best, by coordinate descent over their logarithms."""
    best = replace(start, name=name)
    best_loss, step = fit_loss(rows, best), 0.5
    for _ in range(rounds):
        improved = False
        for key, (low, high) in FITTED.items():
            for factor in (math.exp(step), math.exp(-step)):
                candidate = replace(best, **{key: min(max(getattr(best, key) * factor, low), high)})
                loss = fit_loss(rows, candidate)
                if loss < best_loss - 1e-12:
                    best, best_loss, improved = candidate, loss, True
        step = step if improved else step / 2
        if step < 1e-3:
            break
    return replace(best, **{key: float(f"{getattr(best, key):.4g}") for key in FITTED})


def huber(error: float) -> float:
    size = abs(error)
    return size * size / 2 if size <= HUBER else HUBER * (size - HUBER / 2)


if __name__ == "__main__":
    run_program(main)
