"""Counting and guessing against plain Python: the same counts, the same interpolation, the sampler's own noise."""

import math
import random
from collections import defaultdict

import numpy as np
import pytest

from rlhfuse.gen.cpu import sampling
from rlhfuse.gen.speculation import ngrams
from rlhfuse.gen.speculation.ngrams import CELLS, ORDER

VOCAB = 40


def tables(suffixes: int, pairs: int):
    kept = np.zeros((suffixes, 4), np.int32), np.zeros((pairs, 2), np.int32), np.zeros((2 * pairs, 2), np.int32)
    return kept, np.zeros(3, np.int64)


def text(length: int, seed: int) -> np.ndarray:
    """Tokens that repeat themselves often."""
    rng, tokens = random.Random(seed), [1]
    while len(tokens) < length:
        if rng.random() < 0.5 and len(tokens) > 8:
            start = rng.randrange(len(tokens) - 4)
            tokens += tokens[start : start + rng.randint(2, 6)]
        else:
            tokens.append(rng.randrange(VOCAB))
    return np.array(tokens[:length], np.int32)


def counting(*texts: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Tables that have counted these texts, and how much of them is used."""
    kept, used = tables(1 << 12, 1 << 13)
    for tokens in texts:
        assert ngrams.count(tokens, 1, len(tokens), *kept, used) == len(tokens)
    return kept, used


def counted(texts: list[np.ndarray]) -> dict[tuple[int, ...], dict[int, int]]:
    """What followed each suffix, latest token first: {suffix: {token: count}}."""
    found: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for tokens in texts:
        for i in range(1, len(tokens)):
            for order in range(1, min(ORDER, i) + 1):
                found[tuple(tokens[i - order : i][::-1])][int(tokens[i])] += 1
    return found


def interpolated(context: np.ndarray, counts) -> dict[int, float]:
    """Absolute discounting from the longest known suffix down."""
    p: dict[int, float] = defaultdict(float)
    rest = 1.0
    known = [n for n in range(1, min(ORDER, len(context)) + 1) if tuple(context[::-1][:n]) in counts]
    for order in reversed(known):
        following = counts[tuple(context[::-1][:order])]
        total = sum(following.values())
        for token, count in following.items():
            p[token] += rest * (count - ngrams.DISCOUNT) / total
        rest *= ngrams.DISCOUNT * len(following) / total
        if rest < ngrams.LEAST_REST:
            break
    return p


def guesses(context, limit, kept, *, seed=7, temperature=1.0, hopes=None, top_k=0, top_p=1.0, ban=(), **plan):
    """What `propose` gives for one sample: guesses and their classes."""
    room = np.zeros((1, len(context) + limit + 1), np.int32)
    room[0, : len(context)] = context
    work = np.zeros(VOCAB, np.float32), np.empty(VOCAB, np.int32)
    facts = np.array([seed], np.uint64), np.array([temperature], np.float32), np.array([top_k]), np.array([top_p])
    ends, least_total = np.array([list(ban) or [-1]]), np.array([plan.get("least_total", 0)])
    hopes = np.ones(CELLS, np.float32) if hopes is None else hopes
    rows = plan.get("rows", limit)
    prices = np.array(plan.get("prices", np.ones(rows + 1)), np.float32)
    counts, cells = ngrams.propose(
        room, np.array([0]), np.array([len(context)]), np.array([limit]), rows, (*facts, least_total),
        ends, hopes, prices, kept, work,
    )  # fmt: skip
    assert not work[0].any(), "the room is left as it was"
    return room[0, len(context) : len(context) + counts[0]].tolist(), cells[0, : counts[0]].tolist()


def noise(seed: int, position: int, token: int) -> float:
    key = sampling.noise_keys(np.array([seed], np.uint64), np.array([position]))[0]
    return -math.log(sampling.exponential(sampling.noise_hash(key[0], key[1], token)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_guess_is_the_best_of_interpolated_counts_and_the_samplers_noise(seed, temperature):
    history = [text(300, seed), text(200, seed + 100)]
    kept, used = counting(*history)
    counts, compared = counted(history), 0
    assert used[0] == len(counts) and used[1] == sum(map(len, counts.values()))
    for length in range(1, 200, 3):
        context = history[1][:length] if length % 2 else text(length, seed + 7)
        p = interpolated(context, counts)
        found, _ = guesses(context, 1, kept, seed=seed, temperature=temperature)
        scores = {t: math.log(x) + (noise(seed, length, t) if temperature else 0) for t, x in p.items()}
        if not scores:
            assert found == []
            continue
        best = max(scores.values())
        assert found and best - scores[found[0]] < 1e-4, f"{found} is not the best of {scores}"
        compared += 1
    assert compared > 40


def test_guesses_go_on_after_guesses():
    tokens = text(400, 3)
    kept, _ = counting(tokens)
    several, _ = guesses(tokens[:50], 6, kept)
    assert len(several) == 6
    for place in range(6):
        one, _ = guesses(np.array([*tokens[:50], *several[:place]], np.int32), 1, kept)
        assert one == several[place : place + 1]


def test_end_tokens_are_not_guessed_before_they_are_allowed():
    tokens = np.array([1, 2, 3] * 60, np.int32)
    kept, _ = counting(tokens)
    free, _ = guesses(tokens[:10], 3, kept, temperature=0.0, ban=(3,), least_total=5)
    held, _ = guesses(tokens[:10], 3, kept, temperature=0.0, ban=(3,), least_total=12)
    assert free == [2, 3, 1] and 3 not in held[:2]


@pytest.mark.parametrize("cut", [dict(top_k=1), dict(top_p=0.01)], ids=str)
def test_top_k_and_top_p_leave_the_guess_what_they_leave_the_draw(cut):
    tokens = text(500, 5)
    kept, _ = counting(tokens)
    counts = counted([tokens])
    for length in range(20, 120):
        p = interpolated(tokens[:length], counts)
        (found,), _ = guesses(tokens[:length], 1, kept, **cut)
        assert p[found] > (1 - 1e-5) * max(p.values()), "one of the likeliest"


def two_samples(prices) -> tuple[list[int], list[list[int]]]:
    """One that repeats itself and one of which nothing is known but its last token: their counts and guesses."""
    kept, _ = counting(np.array([5, 6, 7, 8] * 40, np.int32), text(100, 1))
    room = np.zeros((2, 200), np.int32)
    room[0, :9] = np.array([5, 6, 7, 8, 5, 6, 7, 8, 5])
    room[1, :9] = np.array([30, 31, 32, 33, 34, 35, 36, 37, 8])
    hopes = np.full(CELLS, 0.2, np.float32)
    hopes[-1] = 0.9  # the longest suffix, far in front
    work = np.zeros(VOCAB, np.float32), np.empty(VOCAB, np.int32)
    draws = np.arange(2).astype(np.uint64), np.zeros(2, np.float32), np.zeros(2, int), np.ones(2), np.zeros(2, int)
    counts, _ = ngrams.propose(
        room, np.arange(2), np.array([9, 9]), np.array([20, 20]), len(prices) - 1, draws, np.full((2, 1), -1), hopes,
        np.array(prices, np.float32), kept, work,
    )  # fmt: skip
    return counts.tolist(), [room[s, 9 : 9 + counts[s]].tolist() for s in range(2)]


def test_rows_go_where_guesses_are_likely_to_be_right():
    counts, (first, _) = two_samples(np.ones(19))
    assert counts[0] > counts[1] > 0 and sum(counts) == 18
    assert first == ([6, 7, 8, 5] * 9)[: counts[0]]


def test_as_many_guesses_as_give_most_tokens_for_the_price():
    gains = sorted([0.9**n for n in range(1, 9)] + [0.2], reverse=True)
    for price in (0.0, 0.05, 0.2, 0.4, 0.5):
        prices = [1 + price * guesses for guesses in range(9)]
        worth = [(2 + sum(gains[:guesses])) / prices[guesses] for guesses in range(9)]
        counts, _ = two_samples(prices)
        assert sum(counts) == worth.index(max(worth)), price
    assert two_samples([1.0, 3.0, 3.0, 1.2])[0] == [3, 0], "beyond a dear step it may be cheap again"


def test_full_tables_say_where_counting_stopped():
    kept, used = tables(64, 64)
    tokens = text(300, 2)
    reached = ngrams.count(tokens, 1, 300, *kept, used)
    assert 1 < reached < 300
    assert used[0] <= 2 / 3 * 64 and used[1] <= 2 / 3 * 64
