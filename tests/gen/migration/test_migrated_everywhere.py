"""Twenty samples (four every day), each moved to another engine at every position it can stand at: not one bit changes.

Positions are numbers of steps done, from none (nothing computed, nothing drawn) through every chunk of the prompt to
the step before the last token. With a budget of one token a step, the source stands at every single token of the
prompt; with larger ones at the edges of chunks, which meet the edges of blocks in every way. The destination cuts
the prompt into other chunks again.
"""

from __future__ import annotations

import pytest
from testkit.engine_pair import SPEC, Request, Workload
from testkit.gen_models import run_out
from testkit.moves import move_sequences
from testkit.profiles import share

from rlhfuse.gen.engine import SamplingParams

BLOCK = 4
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 19, 20, 21, 24)
BUDGETS = (1, 3, 4, 5, 100)
TOKENS = 7


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(
        [
            Request(
                i,
                tuple((7 * i + 5 * j) % SPEC.vocab for j in range(length)),
                SamplingParams(
                    temperature=(1.0, 0.0, 0.7)[i % 3],
                    top_k=(0, 9)[i % 2],
                    max_tokens=TOKENS,
                    min_tokens=TOKENS,  # the stop tokens are banned: guesses of them are wrong
                    stop_token_ids=(1, 2, 3),
                    seed=i,
                ),
            )
            for i, length in enumerate(LENGTHS)
        ]
    )


def computed_tokens_before_each_step(prompt: int, budget: int) -> list[int]:
    """Chunks of the prompt, then one token after the other; the last token drawn is never run."""
    return [*range(0, prompt, budget), *range(prompt, prompt + TOKENS - 1)]


@pytest.mark.parametrize("mode", ["kv", "tokens"])
@pytest.mark.parametrize("budget", [1, 3, 4])
def test_moved_at_every_position(workload, budget, mode):
    moves, tried = 0, list(enumerate(LENGTHS))[:: 100 // share(100)]
    for i, length in tried:
        expected, request = workload.alone(i, BLOCK), workload.requests[i]
        for steps, computed in enumerate(computed_tokens_before_each_step(length, budget)):
            # without guesses a step is a token
            source = workload.engine(num_blocks=9, block_tokens=BLOCK, max_batched_tokens=budget, draft_rows=0)
            destination = workload.engine(num_blocks=9, block_tokens=BLOCK, max_batched_tokens=BUDGETS[(i + steps) % 5])
            source.add(i, request.prompt, request.params)
            for _ in range(steps):
                assert source.step() == []
            assert source.unfinished()[0].kv_tokens == computed
            recomputed = move_sequences(source, destination, [i], mode, as_bytes=steps % 2 == 0)
            assert recomputed == ([] if mode == "kv" and computed else [i])
            assert run_out(source) == []
            found = run_out(destination)
            assert found == [expected], f"sample {i} moved after {steps} steps, {computed} tokens computed"
            moves += 1
    assert moves == sum(-(-length // budget) + TOKENS - 1 for _, length in tried)


def test_moved_to_an_engine_with_other_blocks(workload):
    """Blocks of another size don't fit, but the tokens move; the size of blocks changes no bit."""
    for request in workload.requests.values():
        expected = workload.alone(request.sample_id, BLOCK)
        for blocks in (1, 5, 16, 48):
            source = workload.engine(num_blocks=9, block_tokens=BLOCK)
            destination = workload.engine(num_blocks=-(-80 // blocks), block_tokens=blocks)
            source.add(request.sample_id, request.prompt, request.params)
            for _ in range(1 + request.sample_id % (TOKENS - 1)):
                source.step()
            move_sequences(source, destination, [request.sample_id], "tokens", as_bytes=True)
            assert run_out(destination) == [expected]
