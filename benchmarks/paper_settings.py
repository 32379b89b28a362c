"""The settings of the RLHFuse paper on this project's simulator, beside the ranges that the paper reports.

    python benchmarks/paper_settings.py [--draws 5] [--variants P,K]

What is assumed, and what the variants are, says paper/settings.py.
"""

from __future__ import annotations

from dataclasses import asdict

from harness import Figure, Measurement, counting, named, options
from paper.page import inside
from paper.settings import MAX_LENGTHS, PAIRS, RANGES, VARIANTS, Cell, predict

from rlhfuse.base.errors import run_program

SWEPT = 1024  # the maximum length whose curve is kept


def main() -> None:
    parser = options(__doc__, seed=False)
    parser.add_argument("--draws", type=counting, default=5, help="batches of lengths drawn and averaged")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="some of P,K,K.3")
    arguments = parser.parse_args()
    variants = named("--variants", arguments.variants, {name: name for name in VARIANTS})
    which = [(pair, length, variant) for variant in variants for length in MAX_LENGTHS for pair in PAIRS]
    if arguments.quick:
        variants, which, arguments.draws = variants[:1], which[:2], 1
    measurement = Measurement("paper_settings", arguments, timed=False)
    cells = [predict(*one, arguments.draws) for one in which]
    title = "Predicted; paper: Gen+Inf 1.2-1.6, Train 1.2-1.3, end to end 1.2-1.4"
    head = ("variant", "max", "actor/critic", "gen s", "gen+inf s", "fused s", "best R_t", "20% loses")
    measurement.table("settings", title, (*head, "Gen+Inf", "Train", "end to end"), [row_of(cell) for cell in cells])
    for variant in variants:
        name, own = variant.lower(), [cell for cell in cells if cell.variant == variant]
        for what, limits in RANGES.items():
            gains = [cell.speedups[what] for cell in own]
            measurement.figure(f"{name}.{what}", Figure.of(gains, "x"))
            measurement.figure(f"{name}.{what}.within", inside(gains, limits), f"of {len(own)}")
        shares = Figure.of([cell.serial_seconds / cell.generation_seconds - 1 for cell in own])
        measurement.figure(f"{name}.inference_over_generation", shares)
    kept = [asdict(cell) | ({} if cell.max_length == SWEPT else {"sweep": {}}) for cell in cells]
    measurement.facts(ranges=RANGES, draws=arguments.draws, cells=kept)
    measurement.finish()


def row_of(cell: Cell) -> list[str]:
    seconds = cell.generation_seconds, cell.serial_seconds, cell.fused_seconds
    loss = cell.sweep["0.20"] / cell.fused_seconds - 1
    gains = [f"{gain:.2f}" for gain in cell.speedups.values()]
    ends = [*(f"{value:.2f}" for value in seconds), f"{cell.best_ratio:.0%}", f"{loss:.1%}", *gains]
    return [cell.variant, str(cell.max_length), cell.pair, *ends]


if __name__ == "__main__":
    run_program(main)
