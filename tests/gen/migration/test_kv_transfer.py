"""Samples change engines: a shared prefix is sent once, a failure loses nothing."""

import sys
from pathlib import Path

import pytest
from testkit.gen_models import add_all, engine_of, run_out, tiny_spec
from testkit.moves import import_sequences, move_sequences
from testkit.profiles import share

import rlhfuse.gen
from rlhfuse.base.errors import InputError
from rlhfuse.gen.engine import Engine, SamplingParams
from rlhfuse.gen.migration.kv_transfer import KVTransfer, SequenceSnapshot, TransferManifest

GEN = Path(rlhfuse.gen.__file__).parent
PROMPT = list(range(8, 69))  # 61 tokens: 15 full blocks of 4
PARAMS = SamplingParams(max_tokens=24, seed=5, ignore_eos=True)


def small_blocks(**options) -> Engine:
    """Entropies travel with the log-probabilities: they are in every result."""
    return engine_of(**({"num_blocks": 300, "block_tokens": 4, "entropies": True} | options))


@pytest.fixture(scope="module")
def siblings():
    """Sixteen samples of one prompt, undisturbed."""
    return small_blocks().generate([PROMPT] * 16, PARAMS)


def running_siblings(steps: int, samples: int = 16, what=(PROMPT, PARAMS)) -> Engine:
    engine, (prompt, params) = small_blocks(), what
    add_all(engine, [prompt] * samples, params, steps)
    return engine


def test_a_prefix_of_sixteen_samples_travels_and_is_stored_once(siblings):
    source, destination = running_siblings(8), small_blocks()
    used = source.options.num_blocks - source.free_blocks
    assert used == 15 + 16 * 2  # 15 shared, and 61 - 60 + 7 tokens of one's own
    sent = []
    with source.export_sequences(range(16)) as transfer:
        assert transfer.manifest.num_blocks == used

        def counted(numbers, heads):
            sent.extend(numbers)
            return transfer.read(numbers, heads)

        assert import_sequences(destination, KVTransfer(transfer.manifest, counted)) == []
    assert sorted(sent) == list(range(used))
    assert destination.options.num_blocks - destination.free_blocks == used
    assert source.free_blocks == source.options.num_blocks and not source.has_unfinished()
    assert run_out(source, destination) == siblings


def test_what_the_destination_knows_is_not_sent(siblings):
    """Half move first; the others then bring only their own blocks."""
    source, destination = running_siblings(8), small_blocks()
    assert move_sequences(source, destination, range(8)) == []
    destination.step()
    with source.export_sequences(range(8, 16)) as transfer:
        with destination.import_sequences(transfer.manifest) as transaction:
            assert len(transaction.missing_blocks) == 8 * 2
            transaction.write(transaction.missing_blocks, transfer.read(transaction.missing_blocks, slice(None)))
    assert destination.options.num_blocks - destination.free_blocks == 15 + 8 * 3 + 8 * 2  # eight went on
    assert run_out(source, destination) == siblings


def test_moved_samples_are_a_known_prefix_for_later_ones(siblings):
    source, destination = running_siblings(8, samples=1), small_blocks()
    move_sequences(source, destination, [0])
    destination.add(1, PROMPT, PARAMS)
    destination.step()
    assert destination.last_step.prefill_tokens == 1  # 60 of 61 came with sample 0
    assert run_out(destination) == siblings[:2]


def test_a_destination_that_is_full_takes_what_it_can(siblings):
    source, destination = running_siblings(8), small_blocks(num_blocks=15 + 2 * 6)
    recomputed = move_sequences(source, destination, range(16))
    assert recomputed == list(range(6, 16))
    assert run_out(destination) == siblings
    source, destination = running_siblings(8), small_blocks(max_sequences=3)
    assert move_sequences(source, destination, range(16)) == list(range(3, 16))
    assert run_out(destination) == siblings


def test_tokens_move_to_an_engine_with_other_blocks(siblings):
    for block_tokens in (1, 5, 16):
        source, destination = running_siblings(8), small_blocks(block_tokens=block_tokens, num_blocks=600)
        assert move_sequences(source, destination, range(16), "tokens", as_bytes=True) == list(range(16))
        assert run_out(destination) == siblings


def test_nothing_lost_or_doubled_wherever_it_fails():
    """An exception at the k-th call into the package during the hand-over, for every k until there are no more."""
    ids, samples, k, short = [0, 2, 3], 5, 0, (PROMPT[:13], SamplingParams(max_tokens=10, seed=5, ignore_eos=True))
    expected = small_blocks().generate([short[0]] * samples, short[1])
    ends = {"source": 0, "destination": 0}
    while True:
        source, destination = running_siblings(7, samples, short), small_blocks()
        move_sequences(source, destination, [1])
        destination.step()
        failed, gone = _fail_at_call(k, source, destination, ids)
        here, there = ({s.sample_id for s in e.unfinished()} for e in (source, destination))
        assert not here & there and here | there == set(range(samples)), f"call {k}"
        assert set(ids) <= (there if gone else here), f"call {k}: the samples were parted"
        assert run_out(source, destination) == expected, f"call {k}"
        ends["destination" if gone else "source"] += 1
        if not failed:
            break
        k += 100 // share(100)  # every fifth call every day
    assert ends["source"] > share(100) and ends["destination"] == 1


def _fail_at_call(k: int, source: Engine, destination: Engine, ids: list[int]) -> tuple[bool, bool]:
    """(whether it failed, whether the samples are at the destination).

    Counted are the calls of the package's functions, and those that they make into C, until the import has returned:
    all that is left then is for the source to forget.
    """
    count = 0

    def profile(frame, event, _):
        nonlocal count
        file = Path(frame.f_code.co_filename)
        # in these a step from list to list is one operation
        bookkeeping = file.name in ("block_manager.py", "forward_batch.py", "scheduler.py")
        if GEN in file.parents and (event == "call" or (event == "c_call" and not bookkeeping)):
            count += 1
            if count == k + 1:
                raise KeyboardInterrupt(f"call {k}")

    try:
        with source.export_sequences(ids) as transfer:
            sys.setprofile(profile)
            try:
                import_sequences(destination, transfer)
            finally:
                sys.setprofile(None)
    except KeyboardInterrupt:
        return True, False
    return False, True


def test_a_failing_read_or_write_leaves_both_engines_as_they_were(siblings):
    """In the middle of the transfer, block by block."""
    for fails_at in (0, 7, 46):
        source, destination = running_siblings(8), small_blocks()
        blocks = iter(range(100))

        with pytest.raises(MemoryError), source.export_sequences(range(16)) as transfer:

            def read(numbers, heads):
                if next(blocks) == fails_at:
                    raise MemoryError("no memory for a bucket")
                return transfer.read(numbers, heads)

            import_sequences(destination, KVTransfer(transfer.manifest, read))
        destination.scheduler.check_integrity()
        assert destination.free_blocks == destination.options.num_blocks and not destination.has_unfinished()
        assert run_out(source) == siblings
        # Blocks that were never filled must not serve as a known prefix.
        assert destination.generate([PROMPT] * 16, PARAMS) == siblings


def test_while_samples_are_offered_their_engine_does_not_step(siblings):
    source = running_siblings(3)
    with source.export_sequences([1, 2], "tokens") as transfer:
        assert transfer.manifest.num_blocks == 0
        again = [source.step, source.pause, lambda: source.abort(1), lambda: move_sequences(source, source, [3])]
        for forbidden in again:
            with pytest.raises(RuntimeError, match=r"samples \[1, 2\] are being exported"):
                forbidden()
    assert {s.sample_id for s in source.unfinished()} == set(range(16)) - {1, 2}
    assert run_out(source) == [siblings[0], *siblings[3:]]


def test_incomplete_blocks_do_not_enter():
    source, destination = running_siblings(3), small_blocks()
    with pytest.raises(RuntimeError, match="not complete"), source.export_sequences([4]) as transfer:
        with destination.import_sequences(transfer.manifest) as transaction:
            some = transaction.missing_blocks[:-1]
            transaction.write(some, transfer.read(some, slice(None)))
            last = transaction.missing_blocks
            transaction.write(last, transfer.read(last, slice(0, 1)), slice(0, 1))  # one of two heads
    assert not destination.has_unfinished() and len(source.unfinished()) == 16
    destination.scheduler.check_integrity()


def test_bad_input_is_refused_and_changes_nothing(siblings):
    source = running_siblings(3)
    for ids, modes, message in (
        ([99], "kv", "sample 99 is not unfinished"),
        ([1, 1], "kv", "twice"),
    ):
        with pytest.raises(InputError, match=message), source.export_sequences(ids, modes):
            pass
    for other, message in (
        (small_blocks(block_tokens=8), "block_tokens=4.*block_tokens=8.*move as tokens"),
        (engine_of(tiny_spec(layers=1)), "layers=2.*layers=1"),
        (running_siblings(1), "already in the engine"),
        (small_blocks(num_blocks=8), "raise num_blocks"),
    ):
        with pytest.raises(InputError, match=message):
            move_sequences(source, other, [0, 1])
    assert run_out(source) == siblings
    with pytest.raises(InputError, match="at most 2 of 3"):
        TransferManifest(source._block_shape, 1, (SequenceSnapshot(0, (1, 2), (3,), (0.0,), PARAMS, 3, (0,)),))
