"""Which layouts a run is told of: its own beside others, at ratios that are as measured, or cut off."""

import pytest
from testkit.four_ranks import SPECS, drafted, run
from testkit.sim_helpers import long_tail

from rlhfuse.costs.cost_model import RewardCost
from rlhfuse.costs.measured import MeasuredRatios
from rlhfuse.costs.speculation import StepObservation
from rlhfuse.planning.price import price, price_generation, weight_moves
from rlhfuse.planning.search.layout_comparison import LayoutComparison, SeenIteration

LENGTHS = long_tail(16, longest=256)
LONG = 600.0  # seconds that no search takes
DRAFT = drafted(run())


def at(draft):
    """The draft with these lengths, and its price."""
    made = drafted(draft.config, SPECS, 4, LENGTHS)
    return made, price(made, price_generation(made), sum(move.seconds for move in weight_moves(made)))


def seen(draft, **ratios: float) -> SeenIteration:
    """An iteration that took so many times what was predicted of each kind of work."""
    (made, predicted), ratio = at(draft), MeasuredRatios(**ratios)
    costs, step = made.costs, (4, 400)
    gained = ratio.generation * 2 * costs.decode_step_seconds(*step)  # two tokens of each
    prefilled = ratio.generation * costs.prefill_seconds(128, 4)
    return SeenIteration(
        LENGTHS,
        [StepObservation(*step, 0, gained, 8, 4), StepObservation(4, 128, 128, prefilled)],
        [(300, 3, ratio.inference * costs.score_seconds(300, 3))],
        ratio.training * (predicted.schedules + predicted.steps),
        ratio.moves * predicted.moves,
        ratio.reward,
    )


def test_as_predicted_it_is_the_plans_price():
    found = LayoutComparison.of(DRAFT, seen(DRAFT), LONG)
    assert [found.ratios.of(work) for work in ("generation", "inference", "training", "moves")] == pytest.approx(
        [1] * 4
    )
    assert found.whole and found.running[1] == pytest.approx(at(DRAFT)[1].seconds)


def test_work_that_took_longer_is_dearer_in_every_layout():
    """Ratios are found again by kind; where all takes twice as long, seconds double and the answer stays."""
    ratios = dict(generation=2.0, inference=2.0, training=2.0, moves=2.0)
    plain, twice = (LayoutComparison.of(DRAFT, seen(DRAFT, **given), LONG) for given in ({}, ratios))
    assert twice.running[1] == pytest.approx(2 * plain.running[1], rel=0.01)
    assert plain.other and twice.other and twice.other[0] == plain.other[0]
    assert twice.other[1] == pytest.approx(2 * plain.other[1], rel=0.01)
    _, predicted = at(DRAFT)
    dear = LayoutComparison.of(DRAFT, seen(DRAFT, training=3.0), LONG)
    assert dear.running[1] - predicted.seconds == pytest.approx(2 * (predicted.schedules + predicted.steps), rel=0.01)
    rewarded = drafted(run(reward__function="a.py:reward"))
    slow = LayoutComparison.of(rewarded, seen(rewarded, reward=RewardCost(5.0)), LONG)
    assert slow.running[1] > predicted.seconds + 5.0, "a call of the reward function counts"


def test_a_run_is_told_of_a_faster_table_and_of_none_when_it_has_it():
    """Given layouts are compared too, and what is printed makes the run that is promised."""
    found = LayoutComparison.of(DRAFT, seen(DRAFT), LONG)
    assert found.other and found.gain > 0.03, "the case has a faster table"
    first, overrides = str(found).splitlines()
    assert f"these take {found.running[1]:.3g} s an iteration, others {found.other[1]:.3g} s (-" in first
    table, _ = found.other
    assert tuple(overrides.split()) == table.overrides()
    best = drafted(table.of(DRAFT.config))
    assert at(best)[1].seconds == pytest.approx(found.other[1])
    stays = LayoutComparison.of(best, seen(best), LONG)
    assert stays.running[0] == table and str(stays).endswith("and no others are 3% faster or more")


def test_a_search_that_is_cut_says_so_and_how_to_go_on():
    cut = LayoutComparison.of(DRAFT, seen(DRAFT), 0.0)
    assert not cut.whole and cut.other is None
    assert str(cut).endswith(
        "none that were priced is 3% faster or more; the search was cut after 0 s, tools/plan.py --search finishes one"
    )
