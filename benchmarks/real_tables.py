"""The cost model against the timings that REAL published (appendix Tables 2-6).

    python benchmarks/real_tables.py [--refit] [--json]

Prints every row beside its prediction with the shipped constants, the error of each table predicted with constants
fitted to the other three, and the seconds of whole iterations. --refit fits the constants anew and prints them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from real.calibration import compare, end_to_end_seconds, fit_calibration, mean_error
from real.tables import BATCH, EAGER_END_TO_END, END_TO_END, real_rows

from rlhfuse.costs.hardware import ASSUMED, REAL_H100, Calibration


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost model against published timings.")
    parser.add_argument("--refit", action="store_true", help="fit the constants anew instead of the shipped ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args()
    calibration = fit_calibration(real_rows(), REAL_H100.name) if args.refit else REAL_H100
    figures = measure(calibration)
    print(json.dumps(figures, indent=1) if args.json else render(figures))


def measure(calibration: Calibration) -> dict:
    """All figures, as JSON values."""
    rows = real_rows()
    errors = compare(rows, calibration)
    return {
        "constants": asdict(calibration),
        "rows": [_row(one) for one in errors],
        "mean_error": mean_error(errors),
        "worst_error": max(abs(one.error) for one in errors),
        "assumed_constants_mean_error": mean_error(compare(rows, ASSUMED)),
        "tables": {table: mean_error([one for one in errors if one.row.table == table]) for table in BATCH},
        "held_out": {table: _held_out(table) for table in BATCH},
        "end_to_end": [_end_to_end(table, eager, calibration) for table in BATCH for eager in (False, True)],
    }


def _row(one) -> dict:
    row = one.row
    return {
        "table": row.table,
        "call": row.call + (" without graphs" if row.eager else ""),
        "layout": str(row.layout),
        "microbatches": row.microbatches,
        "published": row.seconds,
        "derived": row.derived,
        "predicted": one.predicted,
        "error": one.error,
    }


def _held_out(table: str) -> dict:
    """The rows of `table`, predicted with constants that never saw them."""
    rows = real_rows()
    fitted = fit_calibration([row for row in rows if row.table != table], f"without {table}")
    errors = compare([row for row in rows if row.table == table], fitted)
    return {"mean_error": mean_error(errors), "worst_error": max(abs(one.error) for one in errors)}


def _end_to_end(table: str, eager: bool, calibration: Calibration) -> dict:
    rows = [row for row in real_rows() if row.table == table]
    published = (EAGER_END_TO_END if eager else END_TO_END)[table]
    predicted = end_to_end_seconds(rows, calibration, eager)
    return {
        "table": table,
        "graphs": not eager,
        "published": published,
        "predicted": predicted,
        "error": predicted / published - 1,
    }


def render(figures: dict) -> str:
    """The figures as text for people."""
    lines = ["table call                      layout   #mbs  published  predicted  error"]
    for row in figures["rows"]:
        mark = "*" if row["derived"] else " "
        lines.append(
            f"{row['table']:5s} {row['call']:25s} {row['layout']:9s}{row['microbatches']:4d} "
            f"{row['published']:10.1f}{mark}{row['predicted']:10.1f} {row['error']:+6.1%}"
        )
    lines.append("* derived from what End2End grows by: the printed figure repeats the one with graphs")
    lines.append(f"mean error {figures['mean_error']:.1%}, worst {figures['worst_error']:.1%}")
    lines.append(f"constants that nothing was fitted to: mean error {figures['assumed_constants_mean_error']:.1%}")
    for table, error in figures["tables"].items():
        held = figures["held_out"][table]
        lines.append(
            f"{table}: mean {error:.1%}; constants fitted to the other tables: mean {held['mean_error']:.1%}, "
            f"worst {held['worst_error']:.1%}"
        )
    for row in figures["end_to_end"]:
        graphs = "with graphs   " if row["graphs"] else "without graphs"
        lines.append(
            f"{row['table']} end to end {graphs} {row['published']:7.1f} s, predicted {row['predicted']:7.1f} s, "
            f"{row['error']:+.1%}"
        )
    constants = {key: value for key, value in figures["constants"].items() if key != "name"}
    return "\n".join([*lines, "constants: " + ", ".join(f"{key} {value:.4g}" for key, value in constants.items())])


if __name__ == "__main__":
    main()
