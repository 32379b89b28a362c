"""The table of layouts that runs beside the one that would be chosen at the prices that the run has measured.

Measured seconds hold for the layouts that ran: other ones are priced as before a run, each kind of work times what was
measured of it over what was predicted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhfuse.config.auto_layouts import inference_layout
from rlhfuse.config.role import Role
from rlhfuse.costs.cost_model import CostModel, RewardCost
from rlhfuse.costs.measured import MeasuredRatios
from rlhfuse.costs.speculation import StepObservation
from rlhfuse.planning.draft import PlanDraft
from rlhfuse.planning.price import Price, price, price_generation, weight_moves
from rlhfuse.planning.search.search import Ranking
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.search.space import Given
from rlhfuse.planning.search.table import Table
from rlhfuse.simulator.lengths import SampleLengths

WORTH_CHANGING = 0.03  # of an iteration: smaller gains are within what prices are off by


@dataclass(frozen=True)
class SeenIteration:
    """What one iteration took, once kernels were compiled: seconds, and rows as `RankEvents` holds them."""

    lengths: SampleLengths
    steps: Sequence[StepObservation]
    score: Sequence[Sequence[float]]  # tokens, sequences, seconds
    training: float
    moves: float
    reward: RewardCost | None

    def ratios(self, costs: CostModel, predicted: Price) -> MeasuredRatios:
        """To `costs`, and to the price that they give an iteration of these lengths in the layouts that ran."""
        generation = []
        for step in self.steps:
            seconds = costs.decode_step_seconds(step.batch, step.context_tokens) * (1 + step.accepted / step.batch)
            if step.prefill_tokens:
                seconds = costs.prefill_seconds(step.prefill_tokens, step.batch)
            generation.append((step.seconds, seconds))
        scores = [(seconds, costs.score_seconds(tokens, count)) for tokens, count, seconds in self.score]
        training = predicted.schedules + predicted.steps + predicted.offload
        return MeasuredRatios(
            _ratio(generation),
            _ratio(scores),
            _ratio([(self.training, training)]),
            _ratio([(self.moves, predicted.moves)]),
            self.reward,
        )


@dataclass(frozen=True)
class LayoutComparison:
    """`running`: the table that runs; `other`: the fastest other that was priced, if any was; both with seconds of an
    iteration at `ratios`. `whole`: whether no other table can be faster; else the search was cut after `limit` s."""

    ratios: MeasuredRatios
    running: tuple[Table, float]
    other: tuple[Table, float] | None
    whole: bool
    limit: float

    @staticmethod
    def of(draft: PlanDraft, seen: SeenIteration, limit: float) -> LayoutComparison:
        """Layouts of `draft` beside all others, given ones too, searched for at most `limit` seconds.

        Raises InputError where the layouts that run have no place in a table, as it names.
        """
        begin, config = time.monotonic(), draft.run.config
        fusion = dict.fromkeys(("profile", "schedule", "threshold_file"), "")
        setting = Setting.of(draft.run.with_config(config.with_(fusion=fusion)), seen.lengths, Given())
        table = _table_of(draft)
        made, predicted = _priced(setting, table)
        ratios = seen.ratios(made.costs, predicted)
        cores = replace(setting.inputs.cores, ratios=ratios)
        setting = replace(setting, inputs=replace(setting.inputs, cores=cores))
        running = _priced(setting, table)[1].seconds
        ranking = Ranking(setting)
        first = next(ranking.ranked(until=begin + limit), None)
        rows = sorted((row.seconds, row.table.text, row.table) for row in ranking.priced if row.table != table)
        other = (rows[0][2], rows[0][0]) if rows else None
        return LayoutComparison(ratios, (table, running), other, first is not None, limit)

    @property
    def gain(self) -> float:
        """Part of an iteration that the other table saves; 0 where none was priced."""
        return 1 - self.other[1] / self.running[1] if self.other else 0.0

    def __str__(self) -> str:
        took = f"layouts at what was measured ({self.ratios}, of what was predicted)"
        told = f"{took}: these take {self.running[1]:.3g} s an iteration"
        ended = f"; the search was cut after {self.limit:g} s, tools/plan.py --search finishes one"
        unfinished = "" if self.whole else ended
        if self.other is None or self.gain < WORTH_CHANGING:
            others = "no others are" if self.whole else "none that were priced is"
            return f"{told}, and {others} {WORTH_CHANGING:.0%} faster or more{unfinished}"
        table, seconds = self.other
        told += f", others {seconds:.3g} s ({-self.gain:.0%}){unfinished}; to start with those, add to the command:"
        return f"{told}\n  {table}"


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Measured seconds over predicted ones; 1 where there are none."""
    measured, predicted = (sum(side) for side in zip(*pairs)) if pairs else (0.0, 0.0)
    return measured / predicted if measured > 0 and predicted > 0 else 1.0


def _table_of(draft: PlanDraft) -> Table:
    """Raises InputError where models that score lie differently."""
    config, rows = draft.run.config, Given.of(draft.run.config)
    assert rows.generation and rows.actor_train, "a draft has layouts"
    inference = Given.of(config.with_(parallel={"inference": inference_layout(config)})).inference
    critic = rows.critic_train if Role.CRITIC in config.trained() else None
    assert rows.cut and rows.recompute, "and says how mini-batches are cut, and what is run again"
    layouts = rows.generation, inference or rows.generation, rows.actor_train, critic
    return Table(*layouts, rows.cut, rows.recompute, bool(rows.sequence_parallel))


def _priced(setting: Setting, table: Table) -> tuple[PlanDraft, Price]:
    draft = setting.draft(table)
    return draft, price(draft, price_generation(draft), sum(move.seconds for move in weight_moves(draft)))
