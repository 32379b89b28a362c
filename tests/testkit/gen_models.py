"""Small random models and engines for the tests of gen/, and what is done to an engine again and again."""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.engine import Engine, EngineOptions, GenerationResult, SamplingParams


def tiny_spec(**changes) -> ModelSpec:
    facts = dict(
        architecture="llama",
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=172,
        vocab=301,
        context=256,
        eos_token_ids=(7,),
    )
    return ModelSpec(**(facts | changes))


def random_weights(spec: ModelSpec, seed: int = 0, tp_rank: int = 0, tp_size: int = 1) -> dict[str, torch.Tensor]:
    """Weights of rank `tp_rank`; the shares of all ranks are cuts of the same whole."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def part(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x.chunk(tp_size, dim)[tp_rank].clone()

    rows = -(-spec.vocab // 8) * 8
    weights = {"embedding.word_embeddings.weight": part(draw(rows, spec.hidden, scale=1.0))}
    qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    for layer in range(spec.layers):
        p = f"decoder.layers.{layer}."
        gate, up = draw(spec.mlp, spec.hidden), draw(spec.mlp, spec.hidden)
        weights |= {
            p + "input_layernorm.weight": 1 + draw(spec.hidden),
            p + "self_attention.linear_qkv.weight": part(draw(qkv, spec.hidden)),
            p + "self_attention.linear_proj.weight": part(draw(spec.hidden, spec.heads * spec.head_dim), 1),
            p + "pre_mlp_layernorm.weight": 1 + draw(spec.hidden),
            p + "mlp.linear_fc1.weight": torch.cat((part(gate), part(up))),
            p + "mlp.linear_fc2.weight": part(draw(spec.hidden, spec.mlp), 1),
        }
        if spec.qkv_bias:
            weights[p + "self_attention.linear_qkv.bias"] = part(draw(qkv))
        if spec.proj_bias:
            weights[p + "self_attention.linear_proj.bias"] = draw(spec.hidden)
        if spec.qk_norm:
            weights[p + "self_attention.q_layernorm.weight"] = 1 + draw(spec.head_dim)
            weights[p + "self_attention.k_layernorm.weight"] = 1 + draw(spec.head_dim)
    weights["decoder.final_layernorm.weight"] = 1 + draw(spec.hidden)
    if not spec.tied_embeddings:
        weights["output_layer.weight"] = part(draw(rows, spec.hidden))
    return weights


def random_tokens(lengths: Iterable[int], seed: int = 1, vocab: int = 301) -> list[list[int]]:
    """Prompts of these lengths, without the first tokens, which end samples."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, vocab, (n,), generator=generator).tolist() for n in lengths]


TINY = tiny_spec()
PROMPTS = random_tokens((1, 5, 16, 17, 33, 60, 16, 90))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def engine_of(
    spec: ModelSpec = TINY,
    weights: dict[str, torch.Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    tp_group: dist.ProcessGroup | None = None,
    detokenize: Callable[[list[int]], str] | None = None,
    **options,
) -> Engine:
    """An engine over the same random weights each time, this rank's share; of 200 blocks unless `options` differ."""
    if weights is None:
        share = (dist.get_rank(tp_group), dist.get_world_size(tp_group)) if tp_group else (0, 1)
        weights = {name: weight.to(dtype) for name, weight in random_weights(spec, 0, *share).items()}
    made = EngineOptions(**({"num_blocks": 200} | options))
    return Engine(spec, weights, made, dtype=dtype, tp_group=tp_group, detokenize=detokenize)


def add_all(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams], steps: int = 0
) -> list[GenerationResult]:
    """Samples 0, 1, ... enter; returns those that end in the first `steps`."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for sample_id, (prompt, own) in enumerate(zip(prompts, each)):
        engine.add(sample_id, prompt, own)
    return [result for _ in range(steps) for result in engine.step()]


def run_out(*engines: Engine, results: Iterable[GenerationResult] = ()) -> list[GenerationResult]:
    """Run engines to their end; `results` and theirs by sample id. No sample ends twice, no block is lost."""
    found = list(results)
    for engine in engines:
        while engine.has_unfinished():
            engine.scheduler.check_integrity()
            found += engine.step()
        engine.scheduler.check_integrity()
        assert engine.free_blocks == engine.options.num_blocks
    found.sort(key=lambda result: result.sample_id)
    assert len({result.sample_id for result in found}) == len(found), "a sample ended twice"
    return found


def assert_near(found: Sequence[GenerationResult], wanted: Sequence[GenerationResult], bound: float = 1e-5) -> None:
    """The same tokens, and log-probabilities within `bound`."""
    assert [result.tokens for result in found] == [result.tokens for result in wanted]
    for ours, theirs in zip(found, wanted):
        assert max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs)) < bound
