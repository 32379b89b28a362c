"""Whether a run learned: means with standard errors, and a verdict that chance does not give."""

import pytest
from run_report.learning import Average, Learning


def row(iteration, mean, std=0.4, samples=64, **more):
    lengths = {"lengths/output": [3] * samples}
    return {"iteration": iteration, "critic/score/mean": mean, "critic/score/std": std, **lengths, **more}


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
