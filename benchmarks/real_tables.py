"""The cost model against the timings that REAL published (appendix Tables 2-6).

    python benchmarks/real_tables.py [--refit]

Every row beside its prediction, each table predicted with constants fitted to the other three, and whole iterations;
`planned` are the costs of a plan for GPUs, to which nothing was fitted: assumed constants and this project's kernels.
Errors of the fit are those of logarithms, so that a call of five seconds counts as much as one of five minutes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

from harness import Figure, Measurement, options
from paper.real import (
    ASSUMED_REAL,
    BATCH,
    EAGER_END_TO_END,
    END_TO_END,
    REAL_H100,
    RealCalibration,
    RealRow,
    end_to_end_seconds,
    of_table,
    real_rows,
)

from rlhfuse.base.errors import run_program
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
    ASSUMED_REAL,
    name="start",
    forward_layer_seconds=1e-3,
    decode_layer_seconds=2e-4,
    call_seconds=1.0,
    collective_seconds=0.0,  # the floors hold these
    cross_collective_seconds=0.0,
)


def main() -> None:
    parser = options(__doc__, seed=False)
    parser.add_argument("--refit", action="store_true", help="fit the constants anew instead of the shipped ones")
    arguments = parser.parse_args()
    measurement, rows = Measurement("real_tables", arguments, timed=False), real_rows()
    calibration = fit_calibration(rows, REAL_H100.name) if arguments.refit else REAL_H100
    found = errors(rows, calibration)
    cells = [row_cells(row, row.predicted_seconds(calibration)) for row in rows]
    head = ("table", "call", "layout", "#mbs", "published s", "predicted s", "error")
    measurement.table("rows", "Calls (* derived from what End2End grows by)", head, cells)
    measurement.figure("mean_error", Figure(mean(found)).at_most(0.10))
    measurement.figure("worst_error", Figure(max(found)).at_most(0.35))
    measurement.figure("assumed.mean_error", mean(errors(rows, ASSUMED_REAL)))
    measurement.figure("planned.mean_error", Figure(mean(errors(rows, ASSUMED_REAL, Kernels()))).at_most(0.15))
    for kind in ("Gen", "Inf", "Train"):
        own = [row for row in rows if row.work.name.endswith(kind) and not row.eager]
        measurement.figure(f"planned.{kind}.mean_error", mean(errors(own, ASSUMED_REAL, Kernels())))
    head = ("table", "mean error", "fitted to the others", "its worst row", "end to end", "without graphs")
    measurement.table("tables", "Tables", head, [table_cells(measurement, rows, one, calibration) for one in BATCH])
    terms = []
    for keys in (*FITTED, "decode_layer_seconds eager_decode_layer_seconds call_seconds"):
        assumed, fitted = taken(ASSUMED_REAL, calibration, keys), taken(calibration, ASSUMED_REAL, keys)
        terms.append([keys, *(f"{mean(errors(rows, one)):.1%}" for one in (assumed, fitted))])
    head = ("constant", "taken from the fit, others assumed", "assumed, others from the fit")
    measurement.table("terms", "Mean error of all rows: which constants of the fit matter", head, terms)
    measurement.facts(constants=asdict(calibration))
    measurement.finish()


def row_cells(row: RealRow, predicted: float) -> list[str]:
    name = row.work.name + (" without graphs" if row.eager else "")
    seconds = f"{row.seconds:.1f}{'*' if row.derived else ''}", f"{predicted:.1f}"
    error = f"{predicted / row.seconds - 1:+.1%}"
    return [row.table, name, str(row.layout), str(row.work.microbatches), *seconds, error]


def table_cells(
    measurement: Measurement, rows: Sequence[RealRow], table: str, calibration: RealCalibration
) -> list[str]:
    """A table's errors, of constants fitted to the other three too, and its whole iterations; keeps figures."""
    own, others = of_table(rows, table), [row for row in rows if row.table != table]
    fitted = measurement.figure(f"{table}.mean_error", mean(errors(own, calibration))).value
    held = errors(own, fit_calibration(others, f"without {table}"))
    held_out = measurement.figure(f"{table}.held_out", mean(held)).value
    ends = []
    for name, published in (("graphs", END_TO_END[table]), ("eager", EAGER_END_TO_END[table])):
        error = end_to_end_seconds(own, calibration, name == "eager") / published - 1
        measurement.figure(f"{table}.{name}.end_to_end_error", error)
        ends.append(f"{error:+.1%} of {published} s")
    return [table, f"{fitted:.1%}", f"{held_out:.1%}", f"{max(held):.1%}", *ends]


def taken(calibration: RealCalibration, other: RealCalibration, keys: str) -> RealCalibration:
    """The calibration with `keys` as the other has them."""
    return replace(calibration, **{key: getattr(other, key) for key in keys.split()})


def errors(rows: Sequence[RealRow], calibration: RealCalibration, kernels: Kernels | None = None) -> list[float]:
    """How far each row's prediction is from what was published: 0.1 is 10% off."""
    return [abs(row.predicted_seconds(calibration, kernels) / row.seconds - 1) for row in rows]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def fit_loss(rows: Sequence[RealRow], calibration: RealCalibration) -> float:
    """What the fit minimises."""
    return sum(huber(math.log(row.predicted_seconds(calibration) / row.seconds)) for row in rows)


def fit_calibration(
    rows: Sequence[RealRow], name: str, start: RealCalibration = START, rounds: int = 100
) -> RealCalibration:
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
