"""Host-side bookkeeping of a step: the flat batch, the running table, the order in which sequences get their tokens."""

from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.gen.core.block_manager import BlockManager
from rlhfuse.gen.core.forward_batch import ForwardBatch, ScheduledSequence
from rlhfuse.gen.core.scheduler import Scheduler
from rlhfuse.gen.core.sequence import SamplingParams, Sequence


def sequence(sample_id: int, prompt: int, response: int = 6) -> Sequence:
    tokens = [sample_id * 1000 + i for i in range(prompt)]  # no shared prefixes
    return Sequence(sample_id, tokens, SamplingParams(max_tokens=response), prompt + response, frozenset())


def run(scheduler: Scheduler, work: list[ScheduledSequence]) -> list[Sequence]:
    """Stand in for the model: every sequence that draws gets token 7. Returns the finished."""
    scheduler.complete(work)
    for seq in (w.seq for w in work if w.draws):
        seq.append(7, 0.0)
        if seq.finish_reason:
            scheduler.remove(seq)
    return [w.seq for w in work if w.seq.finish_reason]


def batch_twin(work: list[ScheduledSequence], block_tokens: int) -> dict[str, list]:
    """What each field of a ForwardBatch means, token by token."""
    twin = {name: [] for name in ("tokens", "positions", "slots", "contexts", "tables", "draw_rows")}
    twin["query_starts"] = [0]
    for seq, count, _, _ in work:
        everything = seq.prompt + seq.tokens
        for position in range(seq.computed_tokens, seq.computed_tokens + count):
            twin["tokens"].append(everything[position])
            twin["positions"].append(position)
            twin["slots"].append(seq.block_table[position // block_tokens] * block_tokens + position % block_tokens)
        twin["query_starts"].append(len(twin["tokens"]))
        twin["contexts"].append(seq.computed_tokens + count)
        twin["tables"].append(seq.block_table)
        if seq.computed_tokens + count == len(everything):
            twin["draw_rows"].append(len(twin["tokens"]) - 1)
    most = max(map(len, twin["tables"]))
    twin["tables"] = [table + [0] * (most - len(table)) for table in twin["tables"]]
    return twin


@examples(200)
@given(st.data())
def test_any_life_of_sequences_keeps_batches_and_blocks_right(data):
    """Few blocks, few tokens in a step, chunks, growth, preemption, removal: every sample still gets all its tokens.

    Prompts collide or share nothing; some outgrow the first width of the table.
    """
    block_tokens = data.draw(st.integers(1, 5))
    blocks = BlockManager(data.draw(st.integers(-(-46 // block_tokens), 90)), block_tokens)
    scheduler = Scheduler(blocks, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 30)))
    alike, alive = data.draw(st.booleans()), {}
    for i in range(data.draw(st.integers(1, 9))):
        alive[i] = sequence(i, data.draw(st.integers(1, 40)))
        if alike:
            alive[i].prompt[:] = [(number // (1 + i % 3)) % 2 for number in range(len(alive[i].prompt))]
        scheduler.add(alive[i])
    steps = 0
    while alive:
        steps += 1
        assert steps < 2000, "no progress"
        event = data.draw(st.integers(0, 30)) if steps < 60 else 30
        if event == 0:
            scheduler.preempt_all()
        elif event == 1:
            scheduler.remove(alive.pop(min(alive)))
            continue
        work = scheduler.schedule()
        assert work and sum(w.num_tokens for w in work) <= scheduler.max_batched_tokens
        assert len(scheduler.running) <= scheduler.max_sequences
        batch = ForwardBatch.of(work, scheduler.table, block_tokens)
        twin = batch_twin(work, block_tokens)
        assert batch.guesses is None and {name: getattr(batch, name).tolist() for name in twin} == twin
        for seq in run(scheduler, work):
            assert len(seq.tokens) == 6
            del alive[seq.sample_id]
        queued = [*scheduler.running, *scheduler.waiting]
        assert sorted(seq.sample_id for seq in queued) == sorted(alive)
        scheduler.check_integrity()
        blocks.check_integrity(queued)
    assert not scheduler.running and blocks.free_blocks == blocks.num_blocks


@examples(100)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.integers(4, 12),
    st.lists(st.tuples(st.integers(0, 20), st.integers(2, 9), st.booleans()), max_size=3),
)
def test_decoding_never_waits_for_a_prefill(prompts, budget, arrivals):
    """However long the prompts, each decoding sequence gets its token in every step; new ones are admitted in order.

    Sequences that arrive with their keys and values, in the middle of another's chunks, decode at once too.
    """
    scheduler = Scheduler(BlockManager(1000, 4), 20, budget)
    for i, prompt in enumerate(prompts):
        scheduler.add(sequence(i, prompt))
    started: list[int] = []
    for step in range(1000):
        for number in (number for number, (when, _, _) in enumerate(arrivals) if when == step):
            _, tokens, whole = arrivals[number]
            arrived = sequence(100 + number, tokens)
            arrived.append(7, 0.0)
            arrived.computed_tokens = arrived.total_tokens - (1 if whole else 2)
            scheduler.blocks.grow(arrived, arrived.computed_tokens)
            scheduler.add_running(arrived)
        decoding = [seq for seq in scheduler.running if seq.tokens and seq.pending_tokens == 1]
        pending = sum(seq.pending_tokens for seq in (*scheduler.running, *scheduler.waiting))
        work = scheduler.schedule()
        if not work:
            break
        served = {w.seq.sample_id for w in work}
        waited = [seq.sample_id for seq in decoding if seq.sample_id not in served]
        assert not waited or len(decoding) > budget, f"step {step}: {waited} waited"
        assert sum(w.num_tokens for w in work) == min(budget, pending), "chunks fill what decoding leaves"
        started += [w.seq.sample_id for w in work if w.seq.sample_id < 100 and w.seq.sample_id not in started]
        run(scheduler, work)
        scheduler.check_integrity()
    assert started == list(range(len(prompts)))
    assert not scheduler.running and not scheduler.waiting
