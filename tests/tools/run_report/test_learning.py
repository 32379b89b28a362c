"""Whether a run learned: means with standard errors, and a verdict that chance does not give."""

import pytest
from run_report.learning import Average, Learning


def row(iteration, mean, std=0.4, samples=64, **more):
    lengths = {"lengths/output": [3] * samples}
    return {"iteration": iteration, "critic/score/mean": mean, "critic/score/std": std, **lengths, **more}


def test_the_larger_of_two_standard_errors_counts():
    same = [row(i, 1.0) for i in range(4)]
    assert Average.of(same).error == pytest.approx(0.4 / (64 * 4) ** 0.5)
    apart = [row(0, 1.0), row(1, 2.0)]
    assert Average.of(apart).error == pytest.approx(0.5) and Average.of(apart).mean == 1.5
    assert Average.of([row(0, 1.0, std=None)]).error is None
    assert str(Average(0.5, 0.25)) == "+0.500 ± 0.250" and str(Average(0.5, None)) == "+0.500"


@pytest.mark.parametrize(
    "change, words",
    [(0.5, "Yes: the score rose by 0.500"), (-0.5, "No, it got worse: the score fell by 0.500"), (0.05, "Not shown")],
)
def test_three_standard_errors_decide(change, words):
    rows = [row(i, 1.0 + change * (i >= 5)) for i in range(10)]
    (sentence,) = Learning.of(rows, []).sentences(None)
    error = 2**0.5 * 0.4 / (64 * 5) ** 0.5
    assert sentence.startswith(words) and f"That is {abs(change) / error:.1f} standard errors" in sentence
    assert "(first 5 iterations)" in sentence and "(last 5)" in sentence


def test_held_out_prompts_come_first():
    tested = [{"iteration": i, "val/score/mean": mean, "val/score/std_error": 0.1} for i, mean in ((-1, 0.0), (9, 1.0))]
    said = Learning.of([row(i, 1.0) for i in range(2)], [*tested, {"iteration": 10, "val/score/mean": None}])
    held_out, training = said.sentences(None)
    assert held_out.startswith("Yes: the score of held-out prompts rose by 1.000")
    assert training.startswith("Not shown") and "(first iteration)" in training
    assert Learning.of([], tested[:1]).held_out == (Average(0.0, 0.1),)


def test_a_model_that_did_not_move_is_told_by_its_kl():
    rows = [row(i, 1.0, **{"actor/ref_kl": -1e-6, "response_length/mean": 10.0 + i}) for i in range(4)]
    learning = Learning.of(rows, [])
    assert "hardly moved at all: a learning rate of 1e-06" in learning.sentences(1e-6)[-1]
    assert [line[:3] for line in learning.beside()] == [
        ("KL to the reference", "0.0000", "0.0000"),
        ("tokens of a response", "10.5", "12.5"),
    ]
    rows[-1]["actor/ref_kl"] = 0.01
    assert len(Learning.of(rows, []).sentences(1e-6)) == 1


@pytest.mark.parametrize("means", [[], [1.0], [1.0, None], [None, None]])
def test_two_finite_scores_are_needed(means):
    learning = Learning.of([row(i, mean) for i, mean in enumerate(means)], [])
    assert learning.scores is None and "takes two iterations" in learning.sentences(None)[0]
    assert learning.beside() == []


def test_without_any_spread_nothing_is_judged():
    (sentence,) = Learning.of([row(i, i, std=None) for i in range(2)], []).sentences(None)
    assert "no spread to judge that by" in sentence
