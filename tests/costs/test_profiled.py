"""Profiles: interpolation, the file, and what is refused."""

import json
from dataclasses import replace

import pytest
from cost_profiles.measured_grid import grid_of
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.sim_helpers import linear_file

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.fits import Grid
from rlhfuse.costs.forms.training import MicrobatchTokens
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.profile_files import load_costs
from rlhfuse.costs.profiled import ProfiledCost, TrainingGrids, check_made_for

TABLE = Grid(((1.0, 2.0, 4.0), (10.0, 20.0)), (1.0, 2.0, 3.0, 6.0, 5.0, 12.0))


def test_a_grid_is_exact_at_its_points_and_straight_between_and_beyond():
    expected = {(1, 10): 1, (1, 20): 2, (2, 10): 3, (2, 20): 6, (4, 10): 5, (4, 20): 12}
    assert {point: TABLE(*point) for point in expected} == expected
    assert TABLE(3, 10) == 4 and TABLE(1, 15) == 1.5 and TABLE(3, 15) == pytest.approx((3 + 6 + 5 + 12) / 4)
    assert TABLE(8, 10) == 9 and TABLE(1, 40) == 4  # beyond: as between the last two points
    assert TABLE(0.5, 5) == 1  # before: the first point
    line = Grid(((64.0, 128.0),), (1.0, 3.0))
    assert [line(count) for count in (1, 64, 96, 128, 192)] == [1, 1, 2, 3, 5]
    assert Grid(((64.0,),), (2.0,))(1000) == 2  # one point has no slope


@st.composite
def measured_grids(draw):
    axes = [sorted(draw(st.sets(st.integers(1, 500), min_size=1, max_size=5))) for _ in range(draw(st.integers(1, 2)))]
    points = [(a,) for a in axes[0]] if len(axes) == 1 else [(a, b) for a in axes[0] for b in axes[1]]
    chosen = draw(st.lists(st.sampled_from(points), min_size=1, unique=True))
    return grid_of(axes, {point: draw(st.floats(0, 10)) for point in chosen})


@examples(100)
@given(measured_grids(), st.floats(0, 1500), st.floats(0, 1500), st.floats(0, 500))
def test_more_work_never_costs_less_and_nothing_is_negative(grid, first, second, more):
    """Whatever noise was measured, and wherever points were left out."""
    counts = (first, second)[: len(grid.axes)]
    for place in range(len(counts)):
        larger = tuple(count + more * (i == place) for i, count in enumerate(counts))
        assert 0 <= grid(*counts) <= grid(*larger) * (1 + 1e-9) + 1e-9


def test_beyond_its_ends_a_grid_rises_as_it_does_for_less_of_the_other():
    """From 0 to 0.8 for the smaller count alone: straight on, 3 of it would cost more than 3 of the larger."""
    steep = Grid(((1.0, 2.0), (1.0, 2.0)), (0.0, 1.0, 0.8, 1.0))
    assert steep(3.0, 1.0) == pytest.approx(1.6) and steep(3.0, 2.0) == pytest.approx(1.8)
    turned = Grid(((1.0, 2.0), (1.0, 2.0)), (0.0, 0.8, 1.0, 1.0))
    assert turned(1.0, 3.0) == pytest.approx(1.6) and turned(2.0, 3.0) == pytest.approx(1.8)


def test_points_that_were_not_measured_lie_on_the_line_through_the_others():
    axes = ((1, 2, 4, 8), (10, 20, 40))

    def true(batch: float, context: float) -> float:
        return 3 + 0.5 * batch + 0.01 * batch * context

    small = {(b, c): true(b, c) for b in axes[0] for c in axes[1] if b * c <= 80}
    grid = grid_of(axes, small)
    assert grid(8, 40) == pytest.approx(true(8, 40)) and grid(4, 40) == pytest.approx(true(4, 40))
    with pytest.raises(InputError, match="nothing was measured"):
        grid_of(axes, {})


def profile(**changes) -> ProfiledCost:
    made_for = {"generation_tp": 2, "reference_inference_tp": 2, "reward_inference_tp": 1, "dtype": "float32"}
    line = Grid(((100.0, 200.0),), (1e-3, 2e-3))
    base = dict(
        made_for=made_for,
        decode=TABLE,
        prefill=TABLE,
        score={"reference": TABLE, "reward": TABLE},
        swap_in=0.25,
        move=Grid(((1000.0, 2000.0),), (0.5, 0.75)),
        all_reduce=line,
        training={"actor": TrainingGrids(1, line, line, Grid(((100.0,),), (5e-4,)), Grid(((100.0,),), (7e-4,)))},
    )
    return ProfiledCost(**{**base, **changes})


def test_every_kind_of_work_is_looked_up():
    costs = profile().table
    assert costs.decode_step_seconds(2, 40) == 6 and costs.prefill_seconds(4, 20) == 12  # 20 tokens of context each
    assert costs.decode_step_seconds(0, 0) == 0 and costs.prefill_seconds(0, 0) == 0 and costs.score_seconds(0, 1) == 0
    assert costs.score_seconds(4, 20) == TABLE(4, 20) + TABLE(2, 10)  # two reward replicas share the batch
    assert costs.swap_in == 0.25 and costs.migration_seconds(1500) == 0.625
    assert costs.migration_seconds(0) == 0


def test_what_is_larger_than_anything_measured_is_named_and_nothing_else():
    costs, training = profile(), {"actor": 200.0, "critic": 1e9}  # nothing was measured of the critic
    assert costs.beyond(4, 20, 4, training) == ()
    assert costs.beyond(5, 21, 5, training) == (
        "5 sequences decoding (measured: 4)",
        "21 tokens of a context (measured: 20)",
        "5 tokens of a prefill (measured: 4)",
        "5 tokens of a pack for reference (measured: 4)",  # replicas of the reward model have half of it each
    )
    asked = costs.beyond(4, 20, 10, {"actor": 201.0})
    assert asked[-2:] == (
        "5 tokens of a pack for reward (measured: 4)",
        "201 tokens of a micro-batch of actor (measured: 200)",
    )


def test_a_stage_costs_its_layers_and_the_last_one_the_ends():
    spec = ModelSpec("llama", 4, 64, 4, 4, 16, 128, 256, 512)
    analytic = AnalyticCost(spec, ParallelLayout.parse("d1t1p2"), hardware_by_name("cpu"), 4)
    micro = MicrobatchTokens(150, 2, 150)
    made = analytic.stage_costs(micro, seconds=profile().table.stage_seconds("actor", analytic, micro))
    assert made.forward == (3000, 3500) and made.backward == (3000, 3700)  # two layers of 1.5 ms
    assert made.activation == analytic.stage_costs(micro).activation
    for role, tp in (("critic", 1), ("actor", 2)):
        other = replace(analytic, layout=ParallelLayout(1, tp, 2))
        with pytest.raises(InputError, match=f"no training of {role}"):
            profile().table.stage_seconds(role, other, micro)


def test_a_profile_saves_loads_and_is_told_from_measured_costs(tmp_path):
    write_json(tmp_path / "profile.json", profile().to_dict())
    write_json(tmp_path / "costs.json", linear_file().to_dict())
    assert load_costs(tmp_path / "profile.json") == profile()
    assert load_costs(tmp_path / "costs.json") == linear_file()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["costs.json", "profile.json"]
    alone = profile(all_reduce=None, training={})
    assert ProfiledCost.from_dict(alone.to_dict()) == alone


@pytest.mark.parametrize(
    "change, message",
    [
        ([1], "must be a JSON object"),
        ({"version": 1}, "version 1 is unknown; this program reads 2"),
        ({"decode": {}}, "decode.axes is missing"),
        ({"prefill": {"axes": [[2, 1]], "seconds": [1, 1]}}, "prefill: points .* must ascend"),
        ({"move": {"axes": [[1, 2]], "seconds": [1]}}, "move: a grid of \\[2\\] points needs as many seconds"),
        ({"move": {"axes": [[1]], "seconds": [-1]}}, r"seconds of a grid must be in \[0, 1e\+09\], not -1"),
        ({"move": {"axes": [[1]]}}, "move.seconds is missing"),
        ({"swap_in": "soon"}, "swap_in is .soon.; must be a valid number"),
        ({"training": {"actor": {"tp": 1}}}, "training.actor.layer_forward is missing"),
    ],
)
def test_bad_profiles_are_refused(tmp_path, change, message):
    (tmp_path / "p.json").write_text(json.dumps(profile().to_dict() | change if isinstance(change, dict) else change))
    with pytest.raises(InputError, match=message) as caught:
        load_costs(tmp_path / "p.json")
    assert "p.json" in str(caught.value)


def test_a_profile_of_something_else_is_refused():
    check_made_for(profile().made_for, {"generation_tp": 2, "dtype": "float32"}, "p.json")
    with pytest.raises(InputError, match="p.json was made for dtype=float32, this run has bfloat16"):
        check_made_for(profile().made_for, {"dtype": "bfloat16"}, "p.json")
