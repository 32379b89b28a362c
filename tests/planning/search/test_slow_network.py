"""Layouts, moves and R_t follow the network that a profile of several machines has seen."""

import random
from dataclasses import replace

import pytest
from testkit.four_ranks import SPECS
from testkit.search_cases import SearchCase, auto_config, long_tail, profiles_of

from rlhfuse.base.files import write_json
from rlhfuse.costs.profile_files import TensorProfiles
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.search.search import Ranking
from tools.cost_profiles.measured_grid import grid_of

SIZES = tuple(1 << power for power in range(12, 27, 2))


@pytest.fixture
def best_at(tmp_path, monkeypatch):
    """The plan of the fastest table on two machines of two ranks, by a profile with transfers of so many bytes/s."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    case = SearchCase(auto_config(trainer__recompute="none"), SPECS, 4, long_tail(random.Random(1)))
    profiles = profiles_of(case, random.Random(1)).profiles

    def made(rate: float):
        move = grid_of((SIZES,), {(size,): 1e-4 + size / rate for size in SIZES})
        file = tmp_path / f"{rate:g}.json"
        write_json(file, TensorProfiles(tuple(replace(one, move=move) for one in profiles)).to_dict())
        profiled = {"fusion": {"profile": str(file), "search_seconds": 0.1}, "parallel": {"sequence_parallel": "auto"}}
        setting = replace(case, config=case.config.with_(**profiled)).setting
        return setting, PlanReport.of(make_plan(setting.draft(Ranking(setting).fastest(1).best.table)))

    return made


def test_a_slow_network_has_other_layouts_moves_and_threshold(best_at):
    (fast, quick), (slow, dear) = best_at(1e9), best_at(25e6)
    assert fast.inputs.hardware.cross_link_bandwidth == pytest.approx(1e9, rel=0.01)
    assert slow.inputs.hardware.cross_link_bandwidth == pytest.approx(25e6, rel=0.01)
    assert any("25 MB/s between machines" in reason for reason in dear.reasons)
    across = [sum(row.across for row in report.traffic) for report in (quick, dear)]
    assert across[1] < across[0] and quick.threshold.samples != dear.threshold.samples
    modes = [report.generation.limits.move_cost.mode(200, 200) for report in (quick, dear)]
    assert modes == ["kv", "tokens"]
