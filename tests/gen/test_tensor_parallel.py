"""One text through tensor-parallel degrees 1, 2 and 4: near in numbers between degrees, the same bits within one.

Teacher forcing needs nothing but the engine's own interface: each beginning of a fixed text is a prompt, and one
greedy token with its log-probability is asked for. Asked again with that token banned it gives the second best, and
so the gap between the two best logits.
"""

from dataclasses import replace

import pytest
import torch.distributed as dist
from testkit.gen_models import add_all, engine_of, random_tokens, random_weights, run_out, tiny_spec
from testkit.moves import move_sequences

from rlhfuse.gen.engine import Engine, SamplingParams

DEGREES = (1, 2, 4)
SPECS = {
    "llama": tiny_spec(heads=8, kv_heads=4, head_dim=16, mlp=176),
    "qwen2-tied": tiny_spec(heads=4, kv_heads=4, mlp=176, qkv_bias=True, tied_embeddings=True),
    "qwen3-biased": tiny_spec(heads=4, kv_heads=4, mlp=176, qk_norm=True, qkv_bias=True, proj_bias=True),
}
NEAR, BOUND = 1e-4, 1e-5
TEXTS = random_tokens((48, 33, 20), seed=6)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def greedy_everywhere(engine: Engine) -> list[tuple[int, float, float]]:
    """(best token, its log-probability, how far it is above the second best) after each beginning of each text."""
    prompts = [text[:end] for text in TEXTS for end in range(1, len(text) + 1)]
    best = engine.generate(prompts, ONE)
    second = engine.generate(prompts, [replace(ONE, min_tokens=1, stop_token_ids=result.tokens) for result in best])
    return [(b.tokens[0], b.logprobs[0], b.logprobs[0] - s.logprobs[0]) for b, s in zip(best, second)]


def run_degree(rank: int, shape: str, degree: int):
    """On the first `degree` ranks: greedy tokens of all beginnings, and samples batched, cramped, alone and moved."""
    group = dist.new_group(list(range(degree)))
    if rank >= degree:
        return None
    spec = SPECS[shape]
    weights = random_weights(spec, tp_rank=rank, tp_size=degree)
    if spec.tied_embeddings:  # logits of a usual size: float32 rounds larger ones by more than BOUND
        weights["embedding.word_embeddings.weight"] *= 0.2
    group = group if degree > 1 else None
    sizes = dict(block_tokens=8, tp_group=group)
    roomy = engine_of(spec, weights, num_blocks=64, max_sequences=40, max_batched_tokens=256, draft_rows=16, **sizes)
    tight = engine_of(spec, weights, num_blocks=12, max_sequences=3, max_batched_tokens=11, **sizes)
    forced = greedy_everywhere(roomy)
    params = SamplingParams(max_tokens=8, seed=4, ignore_eos=True)
    prompts = [text[: 5 + 9 * i] for i, text in enumerate(TEXTS)] * 2
    alone = []
    for sample_id, prompt in enumerate(prompts):
        roomy.load_weights(weights)  # forgets every prefix
        alone += roomy.generate([prompt], params, [sample_id])
    ways = {"batched": roomy.generate(prompts, params), "cramped": tight.generate(prompts, params)}
    moved = add_all(tight, prompts, params, steps=9)
    move_sequences(tight, roomy, [state.sample_id for state in tight.unfinished()])
    ways["moved"] = run_out(tight, roomy, results=moved)
    if not shape.startswith("qwen"):
        roomy.generate(prompts, replace(ONE, max_tokens=60))
        assert roomy.loop.guesser and roomy.loop.guesser._right.sum() > 0, "greedy text repeats itself and is foreseen"
    return forced, alone, ways


@pytest.mark.parametrize("shape", SPECS)
def test_degrees_agree_and_each_keeps_its_bits(workers, shape, capsys):
    outcomes = {}
    for degree in DEGREES:
        ranks = workers.run(run_degree, shape, degree)[:degree]
        assert all(outcome == ranks[0] for outcome in ranks), f"ranks disagree at tp={degree}"
        outcomes[degree], alone, ways = ranks[0]
        for way, samples in ways.items():
            assert samples == alone, f"bits of samples {way} are others than alone at tp={degree}"
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
