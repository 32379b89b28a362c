"""Greedy tokens of 200 prompts against Hugging Face transformers, position by position.

The engine's own responses go through the other model in one padded forward per group of prompts. Wherever the two
best logits are more than NEAR apart the token must be the best one; the positions that are nearer are counted
and printed, must be few, and must hold one of the best.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from testkit.paths import ROOT, shared_data
from testkit.profiles import share

from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams

TRAINED = ROOT / "examples/sums"
PROMPTS = 200
NEAR = 1e-4  # float32 sums in another order move a logit by about 1e-6
FEW = 0.005  # of all positions
ROUNDING = 3e-5  # of a log-probability; on random prompts transformers' own float32 is 1.5e-5 from its float64

SHAPE = dict(
    vocab_size=397,
    hidden_size=128,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=256,
    initializer_range=0.1,
)
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=1e4)
LLAMA3["original_max_position_embeddings"] = 32
LINEAR = dict(rope_type="linear", factor=2.0, rope_theta=1e4)
TIED = dict(tie_word_embeddings=True)
CASES = {
    "llama": ("LlamaConfig", dict()),
    "llama-tied-llama3-rope": ("LlamaConfig", dict(**TIED, rope_parameters=LLAMA3)),
    "llama-linear-rope-one-kv-head": ("LlamaConfig", dict(num_key_value_heads=1, rope_parameters=LINEAR)),
    "llama-3-layers-no-gqa": (
        "LlamaConfig",
        dict(hidden_size=192, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3),
    ),
    "llama-biased": ("LlamaConfig", dict(attention_bias=True, head_dim=32)),
    "mistral": ("MistralConfig", dict(sliding_window=None)),
    "mistral-window": ("MistralConfig", dict(sliding_window=80)),
    "phi3": ("Phi3Config", dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, hidden_size=256)),
    "qwen2": ("Qwen2Config", dict()),
    "qwen2-tied-rope-theta": ("Qwen2Config", dict(**TIED, rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "qwen3": ("Qwen3Config", dict()),
    "qwen3-tied-8-heads": ("Qwen3Config", dict(**TIED, num_attention_heads=8)),
    "qwen3-biased": ("Qwen3Config", dict(attention_bias=True, head_dim=16)),
}


def random_prompts(count: int, vocab: int, longest: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens; a third begins like another one."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = []
    for i in range(count):
        length = 1 + int(torch.randint(longest, (1,), generator=generator))
        tokens = torch.randint(vocab, (length,), generator=generator).tolist()
        prompts.append((prompts[i // 2][: length // 2] + tokens)[:length] if i % 3 == 2 else tokens)
    return prompts


def best_logits(model: torch.nn.Module, texts: list[list[int]]) -> list[torch.Tensor]:
    """Logits [tokens, vocab] in float64 of each text; padding on the right is behind everything that is read."""
    width = max(map(len, texts))
    with torch.no_grad():
        logits = model(torch.tensor([text + [0] * (width - len(text)) for text in texts])).logits
    return [row[: len(text)].double() for row, text in zip(logits, texts)]


def check(path: Path, prompts: list[list[int]], tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    results = Engine.from_pretrained(path, EngineOptions(max_sequences=64)).generate(prompts, greedy)
    positions = near = 0
    worst = 0.0
    by_length = sorted(zip(prompts, results), key=lambda pair: len(pair[0]))
    for start in range(0, len(by_length), 25):
        group = by_length[start : start + 25]
        logits = best_logits(model, [[*prompt, *result.tokens] for prompt, result in group])
        for (prompt, result), rows in zip(group, logits):
            assert len(result.tokens) == tokens and result.finish_reason == "length"
            rows, drawn = rows[len(prompt) - 1 : -1], torch.tensor(result.tokens)
            best = rows.topk(2).values
            behind = best[:, 0] - rows[range(tokens), drawn]
            assert (behind[best[:, 0] - best[:, 1] > NEAR] == 0).all(), f"other tokens after {prompt}"
            assert behind.max() <= NEAR
            positions += tokens
            near += int((best[:, 0] - best[:, 1] <= NEAR).sum())
            expected = torch.log_softmax(rows, -1)[range(tokens), drawn]
            worst = max(worst, float((expected - torch.tensor(result.logprobs)).abs().max()))
    with capsys.disabled():
        print(f"\n{len(prompts)} prompts, {positions} tokens: {near} near ties, log-probabilities within {worst:.1e}")
    assert near <= FEW * positions and worst < ROUNDING


@pytest.mark.parametrize("case", CASES)
def test_random_model(tmp_path, case, capsys):
    name, changes = CASES[case]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**(SHAPE | changes)))
    for parameter in model.parameters():  # biases and norms start as constants: make them count
        if parameter.ndim == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(tmp_path)
    spec = ModelSpec.from_config(tmp_path)
    assert spec.head_dim == changes.get("head_dim", 64) and spec.context == (80 if "window" in case else 256)
    check(tmp_path, random_prompts(share(PROMPTS), spec.vocab, 60, seed=2), 16, capsys)


def encoded(folder: Path, file: Path, key: str, count: int, longest: int) -> list[list[int]]:
    """Texts that people or programs wrote, through the model's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(json.loads(line)[key]).ids[:longest] for line in file.read_text().splitlines()[:count]]


def test_a_trained_model(capsys):
    prompts = encoded(TRAINED, ROOT / "examples/prompts/sums_held_out.jsonl", "question", PROMPTS // 2, 80)
    check(TRAINED, prompts + random_prompts(PROMPTS // 2, 448, 80, seed=3), 40, capsys)


def test_stories(capsys):
    stories, instructions = shared_data("stories260K-hf"), shared_data("prompts/self_instruct_user_oriented.jsonl")
    prompts = encoded(stories, instructions, "instruction", PROMPTS // 2, 300)
    check(stories, prompts + random_prompts(PROMPTS // 2, 512, 300, seed=3), 48, capsys)


def test_stop_text_with_the_folders_tokenizer():
    engine, greedy = Engine.from_pretrained(TRAINED), SamplingParams(temperature=0, max_tokens=30)
    prompt = encoded(TRAINED, ROOT / "examples/prompts/sums_held_out.jsonl", "question", 1, 80)
    free, cut = (engine.generate(prompt, params)[0] for params in (greedy, replace(greedy, stop="###")))
    assert cut.finish_reason == "stop" and cut.tokens == free.tokens[: len(cut.tokens)] != free.tokens


def test_what_is_drawn_in_turns_has_the_log_probabilities_of_the_final_tokens(capsys):
    model = transformers.AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.float32).eval()
    engine = Engine.from_pretrained(TRAINED, EngineOptions(max_sequences=16))
    params = SamplingParams(max_tokens=68, seed=5, stop_token_ids=range(0, 448, 9), ignore_eos=True, turns=True)
    prompts, answers = random_prompts(40, 448, 60, seed=4), random.Random(6)
    for sample, prompt in enumerate(prompts):
        engine.add(sample, prompt, params)
    results = []
    while engine.samples or engine.has_unfinished():
        results += [result for result in engine.step() if result.finish_reason != "turn"]
        for sample in sorted(engine.parked):
            engine.observe(sample, [answers.randrange(448) for _ in range(answers.randint(1, 9))])
    drawn, worst = 0, 0.0
    for result in results:
        [rows] = best_logits(model, [[*result.prompt_tokens, *result.tokens]])
        expected = torch.log_softmax(rows[len(result.prompt_tokens) - 1 : -1], -1)
        for place, (token, logprob) in enumerate(zip(result.tokens, result.logprobs)):
            if any(start <= place < end for start, end in result.observed):
                assert logprob == 0
                continue
            worst, drawn = max(worst, abs(float(expected[place, token]) - logprob)), drawn + 1
    turns = sum(len(result.observed) for result in results)
    with capsys.disabled():
        print(f"\n{len(results)} samples, {turns} answers, {drawn} tokens: log-probabilities within {worst:.1e}")
    assert len(results) == 40 and turns > 80 and worst < NEAR
