"""The predicted timeline of training: means of what ran, mini-batches above the measured ones."""

import pytest

from rlhfuse.config.spec import ParallelLayout
from rlhfuse.run.timeline import StageTimes, training_spans
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.problem import StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.times import makespan
from rlhfuse.schedule.rules.builders import greedy


def ranks_and_programs():
    layouts = dict.fromkeys(("actor", "critic"), ParallelLayout.parse("d1t1p2"))
    costs = {model: StageCosts((1, 1), (2, 2), (1, 1)) for model in layouts}
    ranks = rank_map(layouts)
    return ranks, lower(greedy(fused_problem(layouts, 2, costs)), ranks)


def stage_times():
    rows = []
    for model in ("actor", "critic"):
        for stage in (0, 1):
            rows += [[model, stage, "F", 2.0, 2], [model, stage, "B", 4.0, 2], [model, stage, "RG", 0.0, 1]]
            rows.append([model, stage, "ST", 0.5 + stage, 1])  # stage 1 also waited a second
    return StageTimes.from_list(rows)


def test_an_optimizer_step_takes_what_the_last_rank_to_come_took():
    times = StageTimes.merge([stage_times(), stage_times()])
    assert times.mean(Action("actor", 1, Kind.B, 0)) == 2.0
    assert times.mean(Action("actor", 1, Kind.ST)) == times.mean(Action("actor", 0, Kind.ST)) == 0.5


def test_predicted_minibatches_stand_above_the_measured_ones():
    ranks, programs = ranks_and_programs()
    step = stage_times().step_times(programs, ranks)
    length = makespan(step)
    spans = training_spans(step, 100.0, [7.0, 7.0 + length + 1, 7.0 + length + 1.5])
    assert {span.rank for span in spans} == {0, 1} and {span.group for span in spans} == {"predicted"}
    starts = [span.start_seconds for span in spans if span.name == "actor:0F0"]
    assert starts[1] - starts[0] == pytest.approx(length + 1), "as far apart as measured"
    assert starts[2] - starts[1] == pytest.approx(length), "but never one over the other"
    kinds = {span.kind for span in spans}
    assert kinds == {f"{model} {kind}" for model in ("actor", "critic") for kind in ("F", "B", "RG", "ST")}
    assert len(spans) == 3 * sum(len(rows) for rows in step.values())
