"""Steps with guesses are priced by what they cost and give; where none were seen nothing is assumed."""

import random

import pytest

from rlhfuse.base.errors import InputError
from rlhfuse.costs.forms.form import DecodeRow
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.costs.speculation import GuessRows, Speculation, StepObservation, fit_steps

ROWS = 16


def plain(batch: int, context: int) -> float:
    return 1e-3 + 2e-5 * batch + 1e-7 * context


def steps(count: int, accepted_of: float, seed: int = 0) -> list[StepObservation]:
    """Up to ROWS rows a step; of a sequence's guesses this share is drawn on average."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        batch, context = rng.randint(1, 24), rng.randint(50, 4000)
        guesses = max(0, ROWS - batch)
        accepted = sum(rng.random() < accepted_of for _ in range(guesses))
        found.append(StepObservation(batch, context, 0, plain(batch, context) + 3e-5 * guesses, guesses, accepted))
    return found


PREFILLS = [StepObservation(1, tokens, tokens, plain(1, tokens) + 1e-4 * tokens) for tokens in (64, 100)]


def measured(decode: list[StepObservation]) -> MeasuredCost:
    return MeasuredCost.fit([*decode, *PREFILLS], [(100, 1, 0.01)], [(0, 0.0)], [0.0])


def test_a_steps_parts_are_found_again():
    line, _, found = fit_steps([*steps(3000, 0.2), *PREFILLS])
    assert found is not None and found.guess_seconds == pytest.approx(3e-5, rel=1e-6)
    assert line(3, 1000) == pytest.approx(plain(3, 1000), rel=1e-6)
    for batch in (1, 4, 8, 15):
        assert found.guesses[batch - 1] == pytest.approx((ROWS - batch) / batch, rel=0.3)
        assert found.tokens[batch - 1] == pytest.approx(1 + 0.2 * (ROWS - batch) / batch, rel=0.2)


def test_without_guesses_nothing_changes():
    observed = [StepObservation(s.batch, s.context_tokens, 0, plain(s.batch, s.context_tokens)) for s in steps(200, 0)]
    line, _, found = fit_steps([*observed, *PREFILLS])
    assert found is None
    costs = measured(observed)
    assert costs.table.decode_step_seconds(5, 900) == line(5, 900)
    assert "speculation" in costs.to_dict() and MeasuredCost.from_dict(costs.to_dict()) == costs


def test_more_sequences_share_the_rows_and_the_largest_flat_batch_falls():
    guessing, guessless = measured(steps(3000, 0.3)), measured([s for s in steps(3000, 0.3) if not s.guesses])
    seconds = [guessing.table.decode_step_seconds(batch, 300 * batch) for batch in range(1, 20)]
    assert seconds == sorted(seconds)
    assert guessing.table.largest_flat_batch(300, 64) < guessless.table.largest_flat_batch(300, 64)
    assert MeasuredCost.from_dict(guessing.to_dict()) == guessing
    assert "give" in str(guessing)


def test_a_last_sample_that_is_hard_to_guess_stands_for_few_batches():
    hard = [StepObservation(1, 300, 0, 1e-3, 4, 0)] * 150
    easy = [StepObservation(batch, 300 * batch, 0, 1e-3, 12, 4) for batch in range(3, 7)] * 150
    found = fit_steps([*hard, *easy, *PREFILLS]).speculation
    assert found is not None and min(found.tokens[2:]) > 1.5
    assert list(found.tokens) == sorted(found.tokens, reverse=True)


def test_beyond_the_rows_a_step_is_plain():
    found = Speculation(1e-5, (7.0, 3.0), (3.0, 2.0))
    assert found.decode_row(1) == DecodeRow(guessing=pytest.approx(7e-5), tokens=3.0)
    assert found.decode_row(3) == found.decode_row(40) == DecodeRow()


@pytest.mark.parametrize("tokens, guesses", [((7.0,), ()), ((), ()), ((1.0,), (0.5,)), ((-1.0,), (1.0,))], ids=str)
def test_what_cannot_be_is_refused(tokens, guesses):
    with pytest.raises(InputError):
        Speculation(1e-5, tokens, guesses)


def run_steps(rows: GuessRows, batch: int, count: int, seconds: float, accepted: int) -> tuple[float, int]:
    """Steps of seconds that are given: how many times as fast as without guesses, and how many had some."""
    spent, tokens, guessed = 0.0, 0, 0
    for _ in range(count):
        guesses = bool(rows.rows(batch))
        guessed += guesses
        took = seconds if guesses else 1.0
        rows.observe(StepObservation(batch, 100 * batch, 0, took, 2 * batch * guesses, accepted * guesses), guesses)
        spent += took
        tokens += batch + accepted * guesses
    return tokens / batch / spent, guessed


def test_guesses_that_cost_more_than_they_give_are_turned_off_and_tried_again():
    """2,000 steps take at most 2% longer than without, and gain what there is to gain."""
    for seconds, accepted, least, fewest, most in (
        (1.5, 2, 0.98, 8, 60),  # 1.25 tokens in 1.5 steps
        (2.5, 0, 0.98, 4, 20),  # none is right
        (1.02, 0, 0.98, 4, 20),
        (1.5, 8, 1.30, 1800, 1900),
    ):
        rows = GuessRows(ROWS, lambda sequences, guesses: 1.0)
        speed, guessed = run_steps(rows, 8, 2000, seconds, accepted)
        assert speed > least and fewest <= guessed <= most, (seconds, accepted, speed, guessed)


def test_what_begins_to_repeat_itself_is_guessed_soon():
    """Where none was right they are tried again four times as soon as where they did not pay."""
    for accepted, fewest, most in ((0, 140, 200), (2, 60, 90)):
        rows = GuessRows(ROWS, lambda sequences, guesses: 1.0)
        assert run_steps(rows, 8, 12, 1.5, accepted)[1] < 6
        assert fewest < run_steps(rows, 8, 200, 1.1, 8)[1] < most, accepted


def test_each_number_of_samples_is_measured_by_itself_and_what_pays_later_comes_back():
    rows = GuessRows(ROWS, lambda sequences, guesses: 1.0 + 0.1 * sequences)
    assert rows.rows(ROWS) == 0
    run_steps(rows, 12, 60, 1.5, 2)
    assert run_steps(rows, 3, 100, 1.2, 3)[1] > 80
    assert run_steps(rows, 12, 60, 1.1, 12)[1] < 10, "nobody has looked again"
    assert run_steps(rows, 12, 2000, 1.1, 12)[1] > 1500


@pytest.mark.parametrize("accepted", [0, 1, 8])
def test_ranks_that_measure_differently_do_the_same(accepted):
    """The first rank's decision is everybody's, and all wait for it at the same steps: no rank's clock has a say."""
    told: list[int] = []
    waited: tuple[list[int], list[int]] = [], []
    first = GuessRows(
        ROWS, lambda sequences, guesses: 1.0, lambda off: told.append(off) or waited[0].append(step) or off
    )
    other = GuessRows(ROWS, lambda sequences, guesses: 1.0, lambda off: waited[1].append(step) or told[-1])
    for step in range(500):
        asked = first.rows(4), other.rows(4)
        assert asked[0] == asked[1]
        searched = bool(asked[0])
        for rank, rows in enumerate((first, other)):
            seconds = (1.0 + rank * (step % 7)) * (1.5 if searched else 1.0)
            rows.observe(StepObservation(4, 400, 0, seconds, searched, accepted * searched), searched)
    assert any(told) == (accepted < 8) and waited[0] == waited[1] and len(told) < 500 / 7
