"""Requests of a chat service, real or drawn, share as many prompt tokens as their block hashes say.

A hash id of the trace names 512 tokens and all before them; here it stands for 16, so that lengths shrink by 32.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from testkit.gen_models import GREEDY, add_all, engine_of, tiny_spec
from testkit.paths import shared_data

BLOCK = 16
REQUESTS, LONGEST = 200, 480


def read_requests(trace: Path) -> list[tuple[list[int], int]]:
    """(hash ids, prompt tokens) of the first requests that are not longer than LONGEST tokens."""
    lines = map(json.loads, trace.read_text().splitlines())
    requests = [(facts["hash_ids"], max(facts["input_length"] * BLOCK // 512, 1)) for facts in lines]
    return [request for request in requests if request[1] <= LONGEST][:REQUESTS]


def draw_requests() -> list[tuple[list[int], int]]:
    """Turns of conversations, each of which is one before it or a system prompt, with something more or without."""
    rng, said = random.Random(0), [list(range(blocks)) for blocks in (0, 2, 5)]
    requests = []
    for number in range(REQUESTS):
        ids = [*rng.choice(said[1:]), *range(1000 * number + 100, 1000 * number + 100 + rng.randint(0, 6))]
        ids = ids[: LONGEST // BLOCK]
        said.append(ids)
        requests.append((ids, len(ids) * BLOCK - rng.choice((0, rng.randint(1, BLOCK - 1)))))
    return requests


def spell(hash_ids: list[int], tokens: int, vocab: int) -> list[int]:
    def block(hash_id: int) -> list[int]:
        return torch.randint(8, vocab, (BLOCK,), generator=torch.Generator().manual_seed(hash_id)).tolist()

    return [token for hash_id in hash_ids for token in block(hash_id)][:tokens]


def expected_reuse(requests: list[tuple[list[int], int]]) -> list[int]:
    """Tokens of each request that earlier ones have: whole blocks, and at least one token is left to run."""
    seen: set[int] = set()
    reuse = []
    for hash_ids, tokens in requests:
        known = 0
        while known < (tokens - 1) // BLOCK and hash_ids[known] in seen:
            known += 1
        seen.update(hash_ids[: tokens // BLOCK])
        reuse.append(known * BLOCK)
    return reuse


@pytest.mark.parametrize("trace", ["drawn", "traces/mooncake_conversation.jsonl"])
def test_reuse_equals_the_reference_and_changes_nothing(trace):
    requests = draw_requests() if trace == "drawn" else read_requests(shared_data(trace))
    spec = tiny_spec(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, mlp=32, context=512)
    prompts = [spell(*request, spec.vocab) for request in requests]
    blocks = sum(len(prompt) // BLOCK + 2 for prompt in prompts)  # no block is ever taken from a known prefix
    engine, params = engine_of(spec, num_blocks=blocks, max_batched_tokens=600), replace(GREEDY, max_tokens=3)
    add_all(engine, prompts, params)
    reused, run, results = 0, 0, {}
    while engine.has_unfinished():
        results |= {result.sample_id: result for result in engine.step()}
        reused += engine.last_step.reused_tokens
        run += engine.last_step.prefill_tokens
        engine.scheduler.check_integrity()
    expected = sum(expected_reuse(requests))
    total = sum(map(len, prompts))
    assert reused == expected > 0.05 * total
    assert run == total - expected

    for i, prompt in enumerate(prompts):
        engine.pause()  # forgets all prefixes
        engine.resume()
        assert engine.generate([prompt], params, [i])[0] == results[i]
        assert engine.last_step.reused_tokens == 0
