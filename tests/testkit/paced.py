"""Prices of a paced run: round numbers, by which a test can say what must last how long."""

from collections.abc import Mapping

from rlhfuse.costs.fits import Line
from rlhfuse.costs.paced import PacedCost, TrainingPrice


def paced(stages: Mapping[str, int], unit: float = 0.01, token: float = 0.0, **more: object) -> PacedCost:
    """A decode step, a forward, a load of all models and a tenth of a step of the optimizer take a `unit` each,
    backwards and packs two, moves five; `token`: seconds of each token beside, in all that has tokens."""

    def line(units: int, *slopes: float) -> Line:
        return Line(units * unit, slopes)

    made = dict(
        decode=line(1, 0.0, 0.0),
        prefill=line(2, token, 0.0),
        score=line(2, token, 0.0),
        migration=line(1, token / 8),
        swap_in=unit,
        meeting=0.0,
        release=0.0,
        models="round numbers",
        token_bytes=8,
        training={
            role: TrainingPrice(((line(1, token), line(2, token)),) * count, 10 * unit, 5 * unit)
            for role, count in stages.items()
        },
    )
    return PacedCost(**{**made, **more})
