"""What each fusion brought: measured seconds beside the same iterations simulated, fused and serial.

The serial run was not run: it is simulated at the lengths that were and the costs that the run measured. How far the
simulation is off is seen where both are known, in the fused run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from run_report.forecast import Forecast, Forecaster
from run_report.run_files import RunFiles


@dataclass(frozen=True)
class FusionGain:
    """Mean seconds of one part of an iteration over `iterations`; or only why there is nothing to compare."""

    name: str
    why_not: str = ""
    iterations: tuple[int, ...] = ()
    measured: float = 0.0
    fused: float = 0.0  # simulated
    serial: float = 0.0  # simulated

    @staticmethod
    def of(name: str, iterations: Sequence[int], seconds: Sequence[Sequence[float]]) -> FusionGain:
        """`seconds`: measured, simulated and serial of each iteration."""
        measured, fused, serial = map(statistics.mean, zip(*seconds))
        return FusionGain(name, "", tuple(iterations), measured, fused, serial)

    @property
    def off(self) -> float:
        """Error of the simulation, relative to what was measured."""
        return self.fused / self.measured - 1 if self.measured else 0.0

    def __str__(self) -> str:
        """What it brought, in words, with like compared to like: simulated with simulated."""
        if self.why_not:
            return f"nothing to compare: {self.why_not}"
        gain = self.serial / self.fused - 1 if self.fused else 0.0
        if gain <= 0:
            return f"no gain by simulation: serial would take {-gain:.0%} less"
        sure = "" if gain > abs(self.off) else f", less than the simulation itself is off ({self.off:+.0%}): measure it"
        return f"by simulation serial would take {gain:.0%} longer{sure}"


def gen_infer_gain(run: RunFiles, forecasts: Sequence[Forecast], unpredicted: str) -> FusionGain:
    """Gain of scoring finished samples while others are generated. `unpredicted`: why there are no forecasts."""
    name = "generation with inference"
    rows = {row["iteration"]: row for row in run.rows}
    if run.setting("fusion", "inter_stage") is False:
        why = "switched off (fusion.inter_stage=false)"
    elif run.rows and run.rows[-1].get("fusion/instances") == 1:
        why = "there is one instance, and only where some still generate can others be freed to score"
    elif not any(row.get("fusion/destinations") for row in run.rows):
        tail = any(row.get("fusion/threshold") for row in run.rows)
        zero = "R_t was 0, as it is where fusing is not predicted to be faster"
        why = f"no iteration was fused: {'no batch had a tail to gather' if tail else zero}"
    elif not forecasts:
        why = unpredicted
    else:
        simulated = [[made["gen"] + made["infer"] for made in (one.seconds, one.serial)] for one in forecasts]
        measured = (rows[one.iteration]["fusion/gen_infer_seconds"] for one in forecasts)
        seconds = [(first, *others) for first, others in zip(measured, simulated)]
        return FusionGain.of(name, [one.iteration for one in forecasts], seconds)
    return FusionGain(name, why)


def training_gain(run: RunFiles, forecaster: Forecaster | None, unpredicted: str) -> FusionGain:
    """Gain of training two models at once, each in the other's bubbles, over the iterations of trace.json."""
    name, problem = "training of actor and critic", run.schedule.problem if run.schedule else None
    rows = {row["iteration"]: row for row in run.rows}
    if problem and len(problem.models) == 1:
        why = f"only the {problem.models[0]} trains, and it takes two models to fill each other's bubbles"
    elif run.setting("fusion", "intra_stage") in (False, "serial"):
        why = "switched off (fusion.intra_stage=serial)"
    elif problem and problem.nodes == 1:
        why = "one rank holds every stage, so that there are no bubbles to fill"
    elif not forecaster or not forecaster.traced:
        why = unpredicted or "trace.json has no whole iteration"
    else:
        measured = (rows[number]["fusion/makespan_measured_seconds"] for number in forecaster.traced)
        seconds = [(first, *forecaster.training(number)) for first, number in zip(measured, forecaster.traced)]
        return FusionGain.of(name, forecaster.traced, seconds)
    return FusionGain(name, why)
