"""What the work of a running job costs: straight lines through what it measured, saved as costs.json.

Paper section 4.2: the threshold is refined while training runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.costs.fits import Line, check_seconds
from rlhfuse.costs.forms.form import Form
from rlhfuse.costs.profiled import check_made_for
from rlhfuse.costs.speculation import Speculation, StepObservation, fit_steps
from rlhfuse.costs.table import CostFile, CostTable, RewardCost
from rlhfuse.tasks.role import ROLES

COLUMNS = {"decode": ("batch", "context tokens"), "prefill": ("tokens", "sequences"), "score": ("tokens", "sequences")}
MEDIANS = ("swap_in", "meeting", "release")
Work = Literal["generation", "inference", "training", "moves"]
Row = Sequence[float]  # counts, then seconds


@dataclass(frozen=True)
class MeasuredRatios:
    """Seconds measured over seconds predicted, 1 where nothing was measured; and a call of the reward function.

    What a run measures holds for its layouts; other ones are priced with the same ratios.
    """

    generation: float = 1.0  # prefills and decode steps
    inference: float = 1.0  # packs, by all models that score
    training: float = 1.0  # schedules and optimizer steps
    moves: float = 1.0  # of weights
    reward: RewardCost | None = None

    def __str__(self) -> str:
        return ", ".join(f"{work} x{getattr(self, work):.2g}" for work in get_args(Work))


@dataclass(frozen=True)
class MeasuredCost(CostFile):
    """Fitted to observations of one instance; swap-in, meeting (at the barrier) and release are medians.

    Means: a call of the reward function, None where there is none; `capture`, 0 where no CUDA graph was recorded.
    """

    version = 4
    of_one_run, measures_training = True, False

    decode: Line  # of batch, context tokens; without guesses
    prefill: Line  # of tokens, sequences
    score: Line  # likewise, of all models that score
    migration: Line  # of bytes
    swap_in: float  # seconds
    meeting: float
    release: float
    reward: RewardCost | None = None  # a file may leave it out
    capture: float = 0.0  # seconds of a shape, likewise
    speculation: Speculation | None = None  # None: no step had guesses
    made_for: Mapping[str, Any] | None = None  # models and machine of the run; None: costs of a checkpoint

    def __post_init__(self) -> None:
        for kind, columns in (*COLUMNS.items(), ("migration", ("bytes",))):
            if len(getattr(self, kind).slopes) != len(columns):
                raise InputError(f"{kind} needs a constant and {len(columns)} slopes")
        for kind in (*MEDIANS, "capture"):
            check_seconds(kind, getattr(self, kind))

    @staticmethod
    def fit(
        steps: Sequence[StepObservation],
        score: Sequence[Row],
        migration: Sequence[Row],
        swap_in: Sequence[float],
        meeting: Sequence[float] = (0.0,),
        release: Sequence[float] = (0.0,),
        reward: Sequence[Row] = (),
        capture: float = 0.0,
    ) -> MeasuredCost:
        """From what an iteration observed (fusion/inter/report.py): rows end with their seconds.

        Raises InputError naming a kind without observations (nothing is guessed) or with a bad number.
        """
        rows = {"score": score, "migration": migration}
        seconds = {
            "step": [step.seconds for step in steps],
            **{kind: [row[-1] for row in seen] for kind, seen in rows.items()},
            "swap_in": swap_in,
            "meeting": meeting,
            "release": release,
        }
        for kind, seen in seconds.items():
            if not len(seen):
                raise InputError(f"no {kind} observation to fit costs from; measure at least one")
            check_seconds(f"seconds of a {kind} observation", *seen)
        lines = {kind: Line.fit([row[:-1] for row in seen], seconds[kind]) for kind, seen in rows.items()}
        work = fit_steps(steps)
        return MeasuredCost(
            decode=work.decode,
            prefill=work.prefill,
            speculation=work.speculation,
            score=lines["score"],
            migration=lines["migration"],
            swap_in=float(np.median(np.asarray(swap_in))),
            meeting=float(np.median(np.asarray(meeting))),
            release=float(np.median(np.asarray(release))),
            reward=RewardCost.mean(reward),
            capture=capture,
        )

    @cached_property
    def table(self) -> CostTable:
        return self._table()

    def _table(self, **more: Any) -> CostTable:
        return CostTable(
            decode=Form.of_line(self.decode),
            prefill=Form.of_line(self.prefill),
            score=Form.of_line(self.score),
            transfer=Form.of_line(self.migration),
            beside=self.speculation,
            swap_in=self.swap_in,
            capture=self.capture,
            meeting=self.meeting,
            release=self.release,
            reward=self.reward,
            **more,
        )

    def check(self, asked: Mapping[str, Any], where: str) -> None:
        known = self.made_for or {}  # its scores are those of all models together
        check_made_for(known, {**asked, **{role: asked.get(role) for role in ROLES if role in known}}, where)

    def __str__(self) -> str:
        lines = (f"{kind:10s} {getattr(self, kind).describe(*names)}" for kind, names in COLUMNS.items())
        move = f"{self.migration.constant * 1e6:.1f} us + {self.migration.slopes[0] * 1e6:.6f} us x bytes"
        medians = (f"{kind.replace('_', '-'):10s} {getattr(self, kind) * 1e6:.1f} us" for kind in MEDIANS)
        reward = [f"reward     {self.reward.seconds * 1e6:.1f} us a call"] if self.reward else []
        capture = [f"capture    {self.capture * 1e3:.1f} ms a shape"] if self.capture else []
        guesses = [f"guesses    {self.speculation}"] if self.speculation else []
        return "\n".join((*lines, f"migration  {move}", *medians, *reward, *capture, *guesses))
