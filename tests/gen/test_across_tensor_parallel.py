"""One text through tensor-parallel degrees 1, 2 and 4: near in numbers between degrees, the same bits within one.

Teacher forcing needs nothing but the engine's own interface: each beginning of a fixed text is a prompt, and one
greedy token with its log-probability is asked for. Asked again with that token banned it gives the second best, and
so the gap between the two best logits.
"""

from __future__ import annotations

import pytest
import torch
from testkit.gen_models import random_weights, tiny_spec

from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams

DEGREES = (1, 2, 4)
SPECS = {
    "llama": tiny_spec(heads=8, kv_heads=4, head_dim=16, mlp=176),
    "qwen2-tied": tiny_spec(heads=4, kv_heads=4, mlp=176, qkv_bias=True, tied_embeddings=True),
    "qwen3": tiny_spec(heads=4, kv_heads=4, mlp=176, qk_norm=True),
}
NEAR, BOUND = 1e-4, 1e-5
OPTIONS = EngineOptions(num_blocks=64, block_tokens=8, max_sequences=40, max_batched_tokens=256)
TIGHT = EngineOptions(num_blocks=12, block_tokens=8, max_sequences=3, max_batched_tokens=11)


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(8, 301, (n,), generator=generator).tolist() for n in (48, 33, 20)]


def greedy_everywhere(engine: Engine) -> list[tuple[int, float, float]]:
    """(best token, its log-probability, how far it is above the second best) after each beginning of each text."""
    prompts = [text[:end] for text in texts() for end in range(1, len(text) + 1)]
    best = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    others = [
        SamplingParams(temperature=0, max_tokens=1, min_tokens=1, ignore_eos=True, stop_token_ids=result.tokens)
        for result in best
    ]
    second = engine.generate(prompts, others)
    return [(b.tokens[0], b.logprobs[0], b.logprobs[0] - s.logprobs[0]) for b, s in zip(best, second)]


def run_degree(rank: int, shape: str, degree: int):
    """On the first `degree` ranks: greedy tokens of all beginnings, and samples batched, cramped and alone."""
    import torch.distributed as dist

    group = dist.new_group(list(range(degree)))
    if rank >= degree:
        return None
    weights = random_weights(SPECS[shape], tp_rank=rank, tp_size=degree)
    if SPECS[shape].tied_embeddings:  # logits of a usual size: float32 rounds larger ones by more than BOUND
        weights["embedding.word_embeddings.weight"] *= 0.2
    roomy, tight = (
        Engine(SPECS[shape], weights, options, tp_group=group if degree > 1 else None) for options in (OPTIONS, TIGHT)
    )
    forced = greedy_everywhere(roomy)
    params = SamplingParams(max_tokens=8, seed=4, ignore_eos=True)
    prompts = [text[: 5 + 9 * i] for i, text in enumerate(texts())] * 2
    alone = []
    for sample_id, prompt in enumerate(prompts):
        roomy.load_weights(weights)  # forgets every prefix
        alone += roomy.generate([prompt], params, [sample_id])
    return forced, alone, roomy.generate(prompts, params), tight.generate(prompts, params)


@pytest.mark.parametrize("shape", SPECS)
def test_degrees_agree_and_each_keeps_its_bits(workers, shape, capsys):
    outcomes = {}
    for degree in DEGREES:
        ranks = workers.run(run_degree, shape, degree)[:degree]
        assert all(outcome == ranks[0] for outcome in ranks), f"ranks disagree at tp={degree}"
        forced, alone, batched, cramped = ranks[0]
        assert alone == batched == cramped, f"bits of a sample depend on its batch at tp={degree}"
        outcomes[degree] = forced
    near, worst = 0, 0.0
    for whole, *parts in zip(*outcomes.values()):
        if whole[2] <= NEAR:
            near += 1
            continue
        for part in parts:
            assert part[0] == whole[0]
            worst = max(worst, abs(part[1] - whole[1]))
    with capsys.disabled():
        print(f"\n{shape}: {len(outcomes[1])} positions, {near} near ties, tp 1, 2, 4 within {worst:.1e}")
    assert near <= 1 and worst < BOUND
