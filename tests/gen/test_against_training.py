"""The engine's log-probabilities against the training model's forward: the same weights, the same tokens, packed.

The engine reads the Megatron model's parameters in place, as in a run; then its samples, prompt and response, go
packed through that very model. One tensor rank and two.
"""

from pathlib import Path

import pytest
import torch
from testkit.paths import ROOT, shared_data
from testkit.tiny import write_checkpoint

from rlhfuse.config.spec import ModelSpec

POOL_RANKS = 2
BOUND = 1e-5
ROUNDING = 3e-5  # of a trained model, whose logits are large: transformers' float32 is 2.6e-5 from its own float64
LENGTHS = (1, 3, 15, 16, 17, 40, 63, 64, 90, 5, 2, 33)
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["original_max_position_embeddings"] = 64
CASES = [
    ("d2t1p1", dict(model_type="llama", head_dim=64)),
    ("d1t2p1", dict(model_type="llama", head_dim=64)),
    ("d2t1p1", dict(attention_bias=True, rope_scaling=LLAMA3)),
    ("d1t2p1", dict(model_type="qwen3", attention_bias=True)),
    ("d2t1p1", dict(model_type="phi3", pad_token_id=None)),
    ("d1t2p1", dict(model_type="phi3", pad_token_id=None)),
    ("d2t1p1", dict(model_type="mistral", head_dim=16, sliding_window=None)),
    ("d1t2p1", dict(model_type="qwen2", tie_word_embeddings=True)),
    ("d2t1p1", dict(model_type="qwen3", head_dim=64)),
]


def sample_and_score(
    rank: int, folder: Path, layout: str, lengths: tuple[int, ...], temperature: float
) -> torch.Tensor:
    """Difference of each response token's log-probability between engine and training model, on this rank.

    Entropies that are further apart raise AssertionError.
    """
    from rlhfuse.base.parallel_layout import ParallelLayout
    from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
    from rlhfuse.models.build import build_model
    from rlhfuse.models.stage import PackedTokens, PipelineStage
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import GroupMaker, plain_grid
    from rlhfuse.run.rank_models import load_part

    device, maker, spec = choose_device("cpu", 0, 1), GroupMaker(600), ModelSpec.from_config(folder)
    grid = plain_grid(ParallelLayout.parse(layout))
    groups = maker.for_model("actor", grid, rank)
    model = build_model(spec, grid, groups, rank, scalar_head=False, dtype=torch.float32, device=device)
    load_part(model, folder, spec, grid, rank, False)
    group = groups.tp if grid.layout.tp > 1 else None
    options = EngineOptions(num_blocks=200, block_tokens=8, max_batched_tokens=100, entropies=True)
    engine = Engine(spec, dict(model.named_parameters()), options, tp_group=group)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, spec.vocab, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=9, ignore_eos=True)
    results = engine.generate(prompts, params)
    stage, differences = PipelineStage(model, first=True, last=True, scalar_head=False), []
    for start in range(0, len(results), 5):
        pack = [[*r.prompt_tokens, *r.tokens] for r in results[start : start + 5]]
        batch = PackedTokens.pack(pack, device.torch_device)
        output = stage.forward(batch, None)
        wanted, targets, drawn, at = [], [], [], 0
        for result, text in zip(results[start:], pack):
            wanted += range(at + len(result.prompt_tokens) - 1, at + len(text) - 1)
            targets += result.tokens
            drawn += result.logprobs
            at += len(text)
        trained, entropies = output.logprobs(torch.tensor(wanted), torch.tensor(targets), spec.vocab, temperature)
        measured = [entropy for result in results[start : start + 5] for entropy in result.entropies]
        torch.testing.assert_close(entropies.detach(), torch.tensor(measured), rtol=0, atol=ROUNDING)
        differences.append((trained.detach().double() - torch.tensor(drawn).double()).abs())
    maker.close()
    return torch.cat(differences)


@pytest.mark.parametrize(("layout", "shape"), CASES, ids=str)
def test_random_model(workers, tmp_path, shape, layout, capsys):
    folder = write_checkpoint(tmp_path / "model", seed=3, **shape)
    temperature = {"d2t1p1": 1.0, "d1t2p1": 0.7}[layout]
    differences, same = workers.run(sample_and_score, folder, layout, LENGTHS, temperature)
    assert torch.equal(differences, same), "ranks disagree"
    with capsys.disabled():
        print(f"\n{shape} {layout}: {len(differences)} log-probabilities within {differences.max():.1e}")
    assert differences.max() < BOUND


@pytest.mark.parametrize("name", ["examples/sums", "stories260K-hf"])
def test_a_trained_model(workers, name, capsys):
    folder = ROOT / name if (ROOT / name).exists() else shared_data(name)
    differences = workers.run(sample_and_score, folder, "d2t1p1", tuple(range(1, 101)), 1.0)[0]
    beyond = float((differences >= BOUND).double().mean())
    with capsys.disabled():
        count, largest = len(differences), float(differences.max())
        print(f"\n{name}: {count} log-probabilities within {largest:.1e}, {beyond:.2%} over {BOUND}")
    assert beyond < 0.01 and differences.max() < ROUNDING
