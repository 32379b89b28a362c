"""What a guesser keeps and forgets: new words at once, old iterations for a while, never more memory than it may."""

import numpy as np

from rlhfuse.costs.speculation import DRAFT_BYTES, DRAFT_ITERATIONS
from rlhfuse.gen.core.forward_batch import RunningTable
from rlhfuse.gen.core.sequence import SamplingParams, Sequence
from rlhfuse.gen.speculation import guesser as module
from rlhfuse.gen.speculation.guesser import Guesser

GREEDY = SamplingParams(temperature=0.0, max_tokens=500)


def guesser_of(vocab: int) -> Guesser:
    return Guesser(vocab, 16, lambda sequences, guesses: 1 + 0.05 * guesses)


def sequence(sample_id: int, prompt: list[int], tokens: list[int]) -> Sequence:
    seq = Sequence(sample_id, prompt, GREEDY, len(prompt) + 500, frozenset((0,)))
    draw(seq, *tokens)
    return seq


def draw(seq: Sequence, *tokens: int) -> None:
    for token in tokens:
        seq.append(token, 0.0)


def propose(guesser: Guesser, *sequences: Sequence, rows: int = 12) -> list[list[int]]:
    table = RunningTable(16)
    for seq in sequences:
        seq.row = -1
        table.add(seq)
    guesser._pause = 0
    guesser._tried[:] = guesser._right[:] = 50  # all guesses were right so far
    return guesser.propose(list(sequences), table, rows)


def test_what_a_sample_drew_is_known_in_the_same_step():
    guesser = guesser_of(50)
    seq = sequence(1, [9], [1, 2, 3, 1, 2, 3, 1])
    assert propose(guesser, seq)[0][:4] == [2, 3, 1, 2]
    draw(seq, 4, 1)
    other = sequence(2, [9], [3, 1])
    assert propose(guesser, other)[0][:1] == [2], "of other samples, whatever their prompt"


def test_samples_that_left_are_counted_once():
    """A sample that was guessed for is in the tables already; only its last tokens are new when it leaves."""
    ours, fresh = guesser_of(50), guesser_of(50)
    seq = sequence(1, [9, 8], [1, 2, 3, 4])
    propose(ours, seq)
    draw(seq, 5, 1, 2)
    for guesser in (ours, fresh):
        guesser.learn(seq)
        propose(guesser, sequence(2, [9], [7]))
    assert ours._used.tolist() == fresh._used.tolist()
    for mine, theirs in zip(ours._tables, fresh._tables):
        assert np.array_equal(mine, theirs)


def test_an_iterations_end_puts_all_its_responses_in_the_place_of_those_written_here():
    guesser = guesser_of(50)
    seq = sequence(1, [9], [1, 2, 3] * 4)
    guesser.learn(seq)
    propose(guesser, seq)
    guesser.end_iteration([((9,), (4, 5, 6) * 4)])
    assert propose(guesser, sequence(2, [9], [4]))[0][:2] == [5, 6]
    assert propose(guesser, sequence(3, [9], [1])) == [], "the iteration's list did not have it"


def test_old_iterations_are_forgotten_and_tables_keep_to_the_planned_memory():
    guesser = guesser_of(50)
    guesser.end_iteration([((9,), (1, 2, 3) * 4)])
    for _ in range(DRAFT_ITERATIONS - 1):
        guesser.end_iteration([((9,), (4, 5, 6) * 4)])
        assert propose(guesser, sequence(1, [9], [1]))[0][:2] == [2, 3]
        guesser.learn(sequence(1, [9], []))
    guesser.end_iteration([((9,), (4, 5, 6) * 4)])
    assert propose(guesser, sequence(1, [9], [1])) == []
    tables = 16 * (module.MOST_SUFFIXES + module.MOST_PAIRS)
    assert tables <= 0.8 * DRAFT_BYTES, "the rest is for tokens and texts"


def held_bytes(guesser: Guesser) -> int:
    """Bytes of the tables, and of the tokens kept to fill them anew."""
    kept = sum(piece.tokens.nbytes for pieces in (*guesser._before, guesser._now) for piece in pieces)
    return kept + guesser._texts.nbytes + sum(table.nbytes for table in guesser._tables)


def test_memory_stays_within_its_limit_and_the_newest_stay_known(monkeypatch):
    monkeypatch.setattr(module, "MOST_SUFFIXES", 1 << 13)
    monkeypatch.setattr(module, "MOST_PAIRS", 1 << 14)
    rng, guesser = np.random.default_rng(0), guesser_of(5000)
    limit = (1 << 13) * 16 + (1 << 14) * 16 + (1 << 18)
    for iteration in range(12):
        responses = [((1,), tuple(rng.integers(0, 5000, 400).tolist())) for _ in range(20)]
        for number, (prompt, response) in enumerate(responses):
            guesser.learn(sequence(number, list(prompt), list(response)))
            propose(guesser, sequence(100, [2], [3]))
            assert held_bytes(guesser) < limit
        last = responses[-1][1]
        assert propose(guesser, sequence(101, [2], list(last[100:104])))[0][:2] == list(last[104:106])
        guesser.learn(sequence(101, [2], []))
        if iteration % 3 == 2:
            guesser.end_iteration(responses)
            assert held_bytes(guesser) < limit


def test_it_gives_up_where_guesses_are_wrong_and_tries_again_later():
    guesser, rng = guesser_of(50), np.random.default_rng(1)
    seq, asked = sequence(1, [9], rng.integers(1, 40, 100).tolist()), 0
    table = RunningTable(4)
    table.add(seq)
    for _ in range(400):
        guesser.rows(1)
        found = guesser.propose([seq], table, 15)
        asked += guesser.searched
        if found:
            guesser.told(0, 1, 0)
        draw(seq, int(rng.integers(1, 40)))
    assert 20 < asked < 200


def test_a_search_in_vain_is_told_and_so_is_a_pause():
    guesser, table = guesser_of(50), RunningTable(4)
    seq = sequence(1, [9], [1, 2])
    table.add(seq)
    told = []
    for _ in range(5):
        guesser.rows(1)
        assert guesser.propose([seq], table, 15) == [], "nothing has been seen twice"
        told.append(guesser.searched)
    assert told == [True, False, True, False, False]


def test_limits_of_a_sample_and_of_the_step_are_kept():
    guesser = guesser_of(50)
    near = sequence(1, [9], [1, 2, 3] * 20)
    near.max_total_tokens = near.total_tokens + 3  # the last of them is drawn, not run
    far = sequence(2, [9], [1, 2, 3] * 20)
    found = propose(guesser, near, far, rows=9)
    assert len(found[0]) <= 2 and sum(map(len, found)) <= 9
    assert found[1][:3] == [1, 2, 3]
    for rows in (0, 1):
        assert sum(map(len, propose(guesser, far, rows=rows))) == rows


def test_turns_are_counted_and_what_was_observed_between_them_is_not():
    ours, fresh = guesser_of(50), guesser_of(50)
    seq = sequence(1, [9], [1, 2])
    ours.learn(seq)
    seq.observe([30, 31, 32])
    draw(seq, 4)
    propose(ours, seq)
    draw(seq, 5)
    ours.learn(seq)
    fresh.learn(sequence(1, [9], [1, 2]))
    fresh.learn(sequence(2, [9, 1, 2, 30, 31, 32], [4, 5]))
    for guesser in (ours, fresh):
        propose(guesser, sequence(3, [9], [7]))
    assert ours._used.tolist() == fresh._used.tolist()
    for mine, theirs in zip(ours._tables, fresh._tables):
        assert np.array_equal(mine, theirs)
