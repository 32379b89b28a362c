"""R_t while training runs: from the plan at first, then from what the run itself shows (paper section 4.2).

After each iteration rank 0 fits the costs to the recent observations and simulates every R_t over the recent lengths:
after the first iterations, and from then on as often as LOOK_SHARE of the time allows. A fixed `fusion.threshold` is
kept; without inter-stage fusion R_t is 0. No error of all this ends training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.base.time_budget import TimeBudget
from rlhfuse.config.settings import RunConfig
from rlhfuse.costs.fits import Line
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.costs.speculation import StepObservation
from rlhfuse.costs.table import CostTable
from rlhfuse.fusion.inter.report import CALLS, GenInferReport
from rlhfuse.parallel.collectives import from_rank_0, transfer_seconds
from rlhfuse.parallel.device import Device
from rlhfuse.planning.plan import Plan
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.run.iteration_metrics import lengths_of
from rlhfuse.simulator.lengths import SampleLengths, read_turns
from rlhfuse.simulator.simulation import Simulation, priced_limits
from rlhfuse.simulator.threshold import Threshold, sweep_threshold
from rlhfuse.tasks.instance_limits import InstanceLimits

RECENT_ITERATIONS = 4
LOOK_SHARE = 0.01  # of the time may go into simulating R_t again
FIRST_LOOKS = 2  # iterations after which it is simulated in any case: the second is the first without compiling
WORTH_MOVING = 0.02  # the curve over R_t is flat around its minimum: smaller gains are noise
NO_SCORING = (0, 0, 0.0)
DECODE_POINTS = ((1, 64), (1, 512), (8, 512))  # sequences and tokens of context that hold a line where none was seen
TOKENS_POINTS = ((64, 1), (512, 1), (512, 8))  # tokens and sequences
PROBE_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)  # sizes of the transfers measured at start
PROBE_TRIPS = 8  # there and back; the first one connects


def with_hysteresis(best: Threshold, current: int, current_seconds: float) -> int:
    """The R_t in force where the best is predicted to gain less than WORTH_MOVING over it, else the best."""
    return current if current_seconds <= best.fused_seconds * (1 + WORTH_MOVING) else best.threshold


def probe_transfer(device: Device) -> list[list[float]]:
    """(bytes, seconds one way) of a few sizes between rank 0 and the last rank; a collective, known to all.

    Of several round trips the fastest counts: what a transfer costs, not how long a busy peer keeps it waiting.
    """
    rows, last = [], dist.get_world_size() - 1
    if last and dist.get_rank() in (0, last):
        rows = [[size, min(transfer_seconds(size, last, PROBE_TRIPS, device))] for size in PROBE_BYTES]
    return from_rank_0(rows)


def step_observations(rows: Sequence[Sequence[float]]) -> list[StepObservation]:
    """Rows as `RankEvents` holds them."""
    return [StepObservation(int(b), int(c), int(p), s, *map(int, guesses)) for b, c, p, s, *guesses in rows]


class InForce(NamedTuple):
    """The values that all ranks follow."""

    threshold: int  # R_t
    limits: InstanceLimits
    fitted: MeasuredCost | None  # to the observations of the run


class ThresholdController:
    """Holds the R_t in force, and on rank 0 the observations that it follows from."""

    def __init__(self, config: RunConfig, plan: Plan, device: Device) -> None:
        """The plan's costs price everything until the first iteration has been measured."""
        self._config, self._planned = config, plan.limits
        self._instances = plan.batch.instances
        self._adapts = config.fusion.inter_stage and config.threshold() is None and self._instances > 1
        self.threshold = plan.threshold or 0
        self._transfers = probe_transfer(device) if config.fusion.inter_stage and self._instances > 1 else []
        if config.trainer.pace:
            self._transfers = [[size, plan.costs.migration_seconds(size)] for size, _ in self._transfers]
        self._observed: deque[dict] = deque(maxlen=RECENT_ITERATIONS)
        self._lengths: deque[SampleLengths] = deque(maxlen=RECENT_ITERATIONS)
        self._plan_costs = plan.costs
        self._fitted: MeasuredCost | None = None
        self._seen = 0  # iterations of this process
        self._looks = TimeBudget(LOOK_SHARE)
        self._warned = ""
        self.limits = self._instance_limits()

    @property
    def in_force(self) -> InForce:
        return InForce(self.threshold, self.limits, self._fitted)

    def follow(self, decided: InForce) -> None:
        """Put in force what rank 0 decided."""
        self.threshold, self.limits, self._fitted = decided

    def observe(self, iteration: int, report: GenInferReport, batch: RolloutBatch) -> str:
        """Take an iteration in, on rank 0. Returns a line for the log when R_t is set or moves, a warning, or ''."""
        if self._seen == 1:
            self._observed.pop()  # the process's first iteration compiled kernels: it counts while there is no other
        self._seen += 1
        self._observed.append(report.observations)
        self._lengths.append(lengths_of(batch, turns=report.turns))
        former = self.in_force
        try:
            return self._predict(iteration)
        except Exception as error:  # a prediction serves training, it does not end it
            self.follow(former)
            text = f"warning: costs and R_t stay as they were ({type(error).__name__}: {' '.join(str(error).split())})"
            message, self._warned = text if text != self._warned else "", text
            return message

    def _predict(self, iteration: int) -> str:
        self._fitted = self._fit()
        self.limits = self._instance_limits()
        if not self._adapts or not (self._seen <= FIRST_LOOKS or self._looks.due()):
            return ""
        before = self.threshold
        with self._looks.spend():
            self.threshold, reason = self._choose()
        if before != self.threshold:
            return f"R_t {before} -> {self.threshold}: {reason}"
        return f"R_t stays {before}: {reason}" if iteration == 0 else ""

    def _choose(self) -> tuple[int, str]:
        """R_t from now on, by simulation of the recent iterations, and why."""
        setting = self._instances, self._costs, self.limits
        least = self._config.fusion.least_threshold
        best = sweep_threshold(list(self._lengths), *setting, least=least)
        if self.threshold < least:
            return best.threshold, best.explain()
        seconds = Simulation(self._lengths, *setting).seconds((self.threshold,))[self.threshold].total
        chosen, gain = with_hysteresis(best, self.threshold, seconds), f"{seconds / best.fused_seconds - 1:.1%}"
        if chosen == self.threshold:
            return chosen, f"the best, {best.threshold}, would gain {gain}"
        return chosen, f"{best.explain()}; {gain} faster than at {self.threshold}"

    @property
    def _costs(self) -> CostTable:
        """In force."""
        return self._fitted.table if self._fitted else self._plan_costs

    def plain_decode(self) -> Line | None:
        """Seconds of a decode step without guesses, of (sequences, tokens of context); None before they are fitted."""
        return self._fitted.decode if self._fitted else None

    def save_costs(self, path: Path, made_for: Mapping[str, Any]) -> None:
        """Write the fitted costs, if there are any yet, which `fusion.profile` of a later run or plan reads."""
        if self._fitted:
            write_json(path, replace(self._fitted, made_for=made_for).to_dict())

    def state(self) -> dict:
        """What the next R_t depends on, as JSON values; `costs` is null until they have been fitted."""
        return {
            "threshold": self.threshold,
            "observations": list(self._observed),
            "lengths": [
                {"prompt": list(seen.prompt), "output": list(seen.output), "turns": list(seen.turns)}
                for seen in self._lengths
            ],
            "costs": self._fitted.to_dict() if self._fitted else None,
        }

    def restore(self, state: dict, where: str, lengths_alone: bool = False) -> None:
        """Inverse of `state`; a fixed or switched-off R_t stays as configured. Raises InputError naming `where`.

        With `lengths_alone` costs and R_t, which are of another layout, are left out.
        """
        try:
            for row in state["lengths"]:
                turns = read_turns(row.get("turns", ()))  # older checkpoints know none
                self._lengths.append(SampleLengths(tuple(row["prompt"]), tuple(row["output"]), turns=turns))
            if lengths_alone:
                return
            self._observed.extend(state["observations"])
            if state["costs"] is not None:
                self._fitted = MeasuredCost.from_dict(state["costs"], where)
            if self._adapts:
                self.threshold = int(state["threshold"])
        except (KeyError, TypeError) as error:
            raise InputError(f"{where}: the threshold state lacks {error}; resume from another checkpoint") from None
        self.limits = self._instance_limits()

    def _fit(self) -> MeasuredCost:
        """Straight lines through what the recent iterations show; of what none shows (decode steps, where every first
        token ends its sample) the former costs stay."""

        def rows(kind: str) -> list[list]:
            return [row for observed in self._observed for row in observed.get(kind, ())]  # older ones know fewer kinds

        def kept(points: Sequence[tuple[int, int]], price: Callable[[float, float], float]) -> list[list]:
            return [[*point, price(*point)] for point in points]

        former = self._costs
        moved = [*self._transfers, *rows("migration")]
        steps = step_observations(rows("step"))
        if all(step.prefill_tokens for step in steps):
            steps += [StepObservation(n, c, 0, s) for n, c, s in kept(DECODE_POINTS, former.decode_step_seconds)]
        if not any(step.prefill_tokens for step in steps):
            steps += [StepObservation(n, t, t, s) for t, n, s in kept(TOKENS_POINTS, former.prefill_seconds)]
        captured = rows("capture")
        capture = sum(s for _, s in captured) / sum(n for n, _ in captured) if captured else former.capture
        scores = bool(self._config.scorers())  # without models to score with, scoring and loading take no time
        score = rows("score") or kept(TOKENS_POINTS, former.score_seconds) if scores else [NO_SCORING]
        return MeasuredCost.fit(
            steps=steps,
            score=score,
            migration=moved or [(0, 0.0)],
            swap_in=[row[0] for row in rows("load")] or [former.swap_in] if scores else [0.0],
            meeting=[row[0] for row in rows("meeting")] or [0.0],
            release=[row[0] for row in rows("release")] or [0.0],
            reward=rows(CALLS),
            capture=capture,
        )

    def _instance_limits(self) -> InstanceLimits:
        """The plan's, priced at the costs in force once lengths have been seen."""
        if not self._lengths:
            return self._planned
        return priced_limits(self._config.fusion.bs_max, self._planned, self._costs, self._lengths[-1])
