"""What work costs in seconds: one value, whoever measured or computed it, which all predictions read.

Its builders: analytic_table.py (rooflines), profiled.py (grids that a program measured), measured.py (lines through
what a run observed), paced.py (prices that the work of a run is made to last for); `with_steps` fits one to a trial.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import LARGEST, Versioned
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.fits import check_seconds
from rlhfuse.costs.forms.form import MODEL, DecodeRow, Form, GridPart, decode_seconds, packed_seconds, transfer_seconds
from rlhfuse.costs.forms.training import MicrobatchTokens, StageSeconds, TrainingTimes
from rlhfuse.costs.speculation import Speculation, StepCosts
from rlhfuse.tasks.instance_limits import InstanceLimits, SampleMoveCost
from rlhfuse.tasks.task import ModelTask


@dataclass(frozen=True)
class RewardCost:
    """One call of the reward function: seconds, and how many calls a worker has under way at once."""

    seconds: float
    at_once: int = 1

    def __post_init__(self) -> None:
        check_seconds("seconds of a reward call", self.seconds)
        if not 1 <= self.at_once <= LARGEST:
            raise InputError(f"calls of a reward function at_once must be in [1, {LARGEST}], not {self.at_once}")

    @staticmethod
    def mean(rows: Sequence[Sequence[float]]) -> RewardCost | None:
        """A call of several rows (calls, how many at once, seconds of them all); None where there was none."""
        calls = sum(row[0] for row in rows)
        return RewardCost(sum(row[2] for row in rows) / calls, int(rows[-1][1])) if calls else None


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds of the work of ONE generation instance, of ONE worker that scores, and of the models that train.

    Workers that lie in one instance count as one, whose replicas share a pack.

    A compiled kernel evaluates the forms (forms/) as the methods here do.
    """

    decode: Form  # one part: seconds of (sequences, tokens of context over all of them)
    prefill: Form  # seconds of (tokens, sequences)
    score: Form  # likewise, of all models that score, one after the other
    transfer: Form  # seconds of bytes
    beside: AnalyticCost | Speculation | None = None  # what a decode step has beside its form; None: nothing
    swap_in: float = 0.0  # of loading the weights of all models that score from host memory
    capture: float = 0.0  # of recording one shape of a decode step as a CUDA graph; 0: not done, or not measured
    meeting: float = 0.0  # of agreeing who holds what, from the last to come until all go on; 0: not measured
    release: float = 0.0  # of giving back cache and weights where nothing more decodes; likewise
    reward: RewardCost | None = None  # a sample's call of the function; None: there is none, or it was not measured
    training: Mapping[str, TrainingTimes] | None = None  # by role; None: rooflines price training
    steps: Mapping[str, float] = field(default_factory=dict)  # of an optimizer's step, of roles that no roofline prices
    moves: Mapping[str, float] = field(default_factory=dict)  # of weights in an iteration, likewise

    @property
    def convex(self) -> bool:
        """Whether seconds of steps and forwards are known to be, in each count: those of rooflines."""
        return self.decode.parts[0].kind == MODEL

    def decode_row(self, batch: float) -> DecodeRow:
        """What a decode step of `batch` sequences has beside its form."""
        return self.beside.decode_row(batch) if self.beside else DecodeRow()

    def prefill_seconds(self, tokens: float, sequences: float) -> float:
        """Prefill of `sequences` prompts of `tokens` tokens in all."""
        return _packed(self.prefill, tokens, sequences)

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        """One decode step of `batch` sequences that hold `context_tokens` of keys and values in all."""
        if batch <= 0:
            return 0.0
        form, row = self.decode, self.decode_row(batch)
        return decode_seconds(form.parts[0], form.points, row, batch, context_tokens)

    def score_seconds(self, tokens: float, sequences: float) -> float:
        """Forward of all models that score over a packed batch, one model after the other."""
        return _packed(self.score, tokens, sequences)

    def score_bends(self) -> tuple[float, ...]:
        """Tokens of one replica's pack at which seconds of scoring bend."""
        grids = [part for part in self.score.parts if isinstance(part, GridPart)]
        return tuple(tokens for part in grids for tokens in self.score.points[part.start : part.start + part.rows])

    def migration_seconds(self, kv_bytes: float) -> float:
        """Sending (or receiving) `kv_bytes` of keys and values between two instances."""
        form = self.transfer
        return transfer_seconds(form.parts, 0, len(form.parts), form.points, kv_bytes)

    def with_steps(self, steps: StepCosts) -> CostTable:
        """With prefills and decode steps as a generation trial measured them; all else as it is."""
        decode, prefill = Form.of_line(steps.decode), Form.of_line(steps.prefill)
        return replace(self, decode=decode, prefill=prefill, beside=steps.speculation)

    def link_bandwidth(self) -> float:
        """Bytes/s between two instances, of large transfers; without end where these take no longer."""
        size = 1 << 24
        seconds = self.migration_seconds(2 * size) - self.migration_seconds(size)
        return size / seconds if seconds > 0 else math.inf

    def stage_seconds(self, role: str, roofline: AnalyticCost, micro: MicrobatchTokens) -> StageSeconds:
        """Training of `role` on one micro-batch, by its `roofline` where nothing was measured. Raises InputError where
        that was for other layouts."""
        if self.training is None:
            return roofline.stage_seconds(micro)
        if role not in self.training:
            raise InputError(f"no training of {role} was measured; profile this config again")
        return self.training[role].stage_seconds(role, roofline.layout, micro)

    def largest_flat_batch(self, median_context_tokens: float, limit: int, tolerance: float = 0.1) -> int:
        """BS_max: the largest batch <= `limit` whose decode step is within `tolerance` of batch 1's at that context."""
        allowed = (1 + tolerance) * self.decode_step_seconds(1, median_context_tokens)
        low, high = 1, max(1, limit)
        while low < high:  # a step's seconds grow with the batch, so bisection finds the edge
            middle = (low + high + 1) // 2
            if self.decode_step_seconds(middle, middle * median_context_tokens) <= allowed:
                low = middle
            else:
                high = middle - 1
        return low

    def move_cost(self, limits: InstanceLimits) -> SampleMoveCost:
        """The two straight lines that decide how a sample moves: through the costs of one block and of one longest
        sample."""
        near, far = limits.block_tokens, max(limits.longest, limits.block_tokens + 1)
        prefill = [self.prefill_seconds(tokens, 1) for tokens in (near, far)]
        slope = (prefill[1] - prefill[0]) / (far - near)
        volumes = [tokens * limits.kv_bytes_per_token for tokens in (near, far)]
        transfer = [self.migration_seconds(volume) for volume in volumes]
        per_byte = (transfer[1] - transfer[0]) / (volumes[1] - volumes[0])
        return SampleMoveCost(
            kv_bytes_per_token=limits.kv_bytes_per_token,
            transfer_latency_seconds=transfer[0] - per_byte * volumes[0],
            transfer_seconds_per_byte=per_byte,
            prefill_seconds_per_token=slope,
            prefill_latency_seconds=prefill[0] - slope * near,
        )


def _packed(form: Form, tokens: float, sequences: float) -> float:
    return packed_seconds(form.parts, 0, len(form.parts), form.points, tokens, sequences)


class CostFile(Versioned):
    """A file of costs, from which a table follows."""

    of_one_run: ClassVar[bool] = False  # it holds for the layouts of the run that measured it
    measures_training: ClassVar[bool] = True
    table: CostTable

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor degrees of whose profiles that of any layouts is put together; empty where it is of one table."""
        return ()

    def at(self, tp: int) -> CostTable:
        """The table by which training with this tensor degree is priced. Raises InputError where none is."""
        return self.table

    def of(self, tasks: Sequence[ModelTask], where: str = "profile") -> CostFile:
        """The file of a run with these layouts. Raises InputError naming `where`."""
        return self

    def link_bandwidth(self) -> float:
        """As `CostTable.link_bandwidth`."""
        return self.table.link_bandwidth()

    def beyond(self, sequences: float, context: float, pack: float, training: Mapping[str, float]) -> tuple[str, ...]:
        """What is larger than anything measured, in words: decoding so many `sequences` of up to `context` tokens,
        packs of so many tokens of an instance, and by role micro-batches of so many."""
        return ()

    def check(self, asked: Mapping[str, Any], where: str) -> None:
        """Raise InputError naming `where` unless it was made for the facts of a run that are `asked`."""
