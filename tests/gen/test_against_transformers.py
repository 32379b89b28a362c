"""Tokens and log-probabilities against Hugging Face models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhfuse.gen.engine import Engine, SamplingParams

STORIES = Path(__file__).resolve().parents[2] / "../shared/data/stories260K-hf"
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
CASES = {
    "llama": ("LlamaConfig", dict(head_dim=32)),
    "llama3-rope": ("LlamaConfig", dict(head_dim=32, rope_parameters=ROPE_LLAMA3, tie_word_embeddings=True)),
    "linear-rope": ("LlamaConfig", dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})),
    "biased-llama": ("LlamaConfig", dict(attention_bias=True)),
    "biased-qwen3": ("Qwen3Config", dict(attention_bias=True, head_dim=16)),
    "phi3": ("Phi3Config", dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    "qwen2": ("Qwen2Config", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3Config", dict(head_dim=64)),
}


def check(path: Path, prompts: list[list[int]], tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for prompt, result in zip(prompts, Engine.from_pretrained(path).generate(prompts, greedy)):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *result.tokens]])).logits[0].double()
        logits = logits[len(prompt) - 1 : -1]
        assert tuple(logits.argmax(-1).tolist()) == result.tokens
        expected = torch.log_softmax(logits, -1)[range(tokens), list(result.tokens)]
        assert (expected - torch.tensor(result.logprobs)).abs().max() < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_random_model(tmp_path, case):
    import transformers

    name, changes = CASES[case]
    config = getattr(transformers, name)(
        **(
            dict(
                vocab_size=211,
                hidden_size=96,
                intermediate_size=80,
                num_hidden_layers=2,
                num_attention_heads=6,
                num_key_value_heads=2,
                max_position_embeddings=256,
                initializer_range=0.1,
            )
            | changes
        )
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases and norms start as constants: make them count
        if parameter.ndim == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(tmp_path)
    check(tmp_path, [[3, 4, 5], [10], list(range(20, 120))], 24)


def test_stories():
    if not STORIES.exists():
        pytest.skip(f"{STORIES} is not here")
    check(STORIES, [[1], [1, 403, 407], [1, 261, 400, 300, 20]], 100)


def test_stop_text_with_the_folders_tokenizer():
    if not STORIES.exists():
        pytest.skip(f"{STORIES} is not here")
    engine = Engine.from_pretrained(STORIES)
    result = engine.generate([[1]], SamplingParams(temperature=0, max_tokens=100, stop=(".",)))[0]
    assert result.finish_reason == "stop" and len(result.tokens) < 100
