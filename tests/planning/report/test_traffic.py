"""Rows of what ranks send each other: every byte of a plan once, within machines or across, whatever it is for."""

import pytest
from testkit.four_ranks import planned, run

from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.report.traffic import TrafficRow


@pytest.fixture
def on_nodes_of(monkeypatch):
    def made(ranks: int, **keys) -> dict[str, TrafficRow]:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        return {row.purpose: row for row in PlanReport.of(planned(run(**keys))).traffic}

    return made


def test_one_machine_sends_nothing_across_and_the_same_as_two(on_nodes_of):
    alone, two = on_nodes_of(4), on_nodes_of(2)
    moving = {purpose for purpose in two if purpose.startswith("weights of")}
    assert alone.keys() == two.keys() and len(moving) == 2
    for purpose in two.keys() - moving:  # moves go other ways where a part that crosses is forwarded
        assert alone[purpose].across == 0 < alone[purpose].within == two[purpose].within + two[purpose].across
