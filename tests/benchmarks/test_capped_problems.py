"""The problems of a search under a cap: as many of each set, none twice, all possible, capped as their names say."""

import pytest
from capped_problems import LEVELS, OPTIMA, PEAKS, SETS

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.rules.builders import min_memory


@pytest.fixture(scope="module")
def made():
    return {kind: {name: make() for name, make in of.problems().items()} for kind, of in SETS.items()}


def test_both_sets_have_as_many_problems_and_share_none(made):
    review, fresh = made.values()
    assert len(review) == len(fresh) == 33 and set(OPTIMA) <= set(review)
    assert not set(review.values()) & set(fresh.values())
    assert {kind: of.problems()["r03s" + ("3" if kind == "review" else "1")]() for kind, of in SETS.items()} == {
        "review": review["r03s3"],
        "fresh": fresh["r03s1"],
    }, "made again they are the same"


def test_caps_lie_between_the_least_possible_and_the_peak(made):
    for problems in made.values():
        for name, problem in problems.items():
            least = min_memory(problem)
            rooms = [problem.node_cap(node) for node in range(problem.nodes)]
            assert all(room >= needed for room, needed in zip(rooms, least)), name
            assert any(p.split for p in problem.pipelines) == (name[3] == "s") or name.startswith("llama")
            if name.startswith("t"):
                peak, level = PEAKS[int(name[1:3]) - 1], LEVELS[int(name[-1])]
                assert rooms == pytest.approx([a + level * (peak - a) for a in least])


def test_bounds_do_not_pass_the_optima_that_are_known(made):
    bounds = {name: latency_bound(made["review"][name]) for name in OPTIMA}
    assert all(bound <= OPTIMA[name] for name, bound in bounds.items()) and bounds["r07w1"] == OPTIMA["r07w1"]
