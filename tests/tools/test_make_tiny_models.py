"""The embedded tiny models as committed, and the two programs that make them."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from safetensors import safe_open
from testkit.paths import ROOT
from testkit.programs import call_tool
from tiny_models import stories
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.models.reward_training import encode_pairs, score_pairs

TINY = ROOT / "examples" / "tiny"
PROMPTS = ROOT / "examples" / "prompts" / "quickstart.jsonl"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY / "actor")


@pytest.fixture(scope="module")
def actor():
    return AutoModelForCausalLM.from_pretrained(TINY / "actor", dtype=torch.float32).eval()


def held_out_prompts(count: int) -> list[str]:
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()][:count]


def test_models_are_small_and_stored_in_bfloat16():
    assert sum(path.stat().st_size for path in TINY.rglob("*") if path.is_file()) <= 6_000_000
    for role in ("actor", "reward"):
        with safe_open(TINY / role / "model.safetensors", "pt") as weights:
            assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}


def test_actor_has_the_promised_shape(actor):
    spec = ModelSpec.from_config(TINY / "actor")
    assert sum(p.numel() for p in actor.parameters()) == spec.parameters()
    assert 1_000_000 <= spec.parameters() <= 1_500_000
    assert spec.head_dim >= 16 and spec.mlp % 32 == 0
    for layout in ("d1t2p1", "d1t1p4", "d1t2p2"):
        ParallelLayout.parse(layout).check_model(spec, "actor_train")


def test_reward_model_is_the_same_trunk_with_one_score():
    spec, actor_spec = (ModelSpec.from_config(TINY / role) for role in ("reward", "actor"))
    assert spec == actor_spec
    model = AutoModelForSequenceClassification.from_pretrained(TINY / "reward")
    assert model.score.weight.shape == (1, spec.hidden)
    assert model.config.pad_token_id not in spec.eos_token_ids
    assert sum(p.numel() for p in model.parameters()) == spec.parameters(scalar_head=True)


def test_both_tokenizers_are_one_and_go_round(tokenizer):
    assert (TINY / "actor" / "tokenizer.json").read_bytes() == (TINY / "reward" / "tokenizer.json").read_bytes()
    spec = ModelSpec.from_config(TINY / "actor")
    assert len(tokenizer) <= spec.vocab
    assert tokenizer.bos_token_id == spec.bos_token_id and (tokenizer.eos_token_id,) == spec.eos_token_ids
    rng = stories.generator(77, "round trip")
    for text in [stories.draw_story(rng) for _ in range(50)] + ["Zürich, 東京 & 42\n\ttabs"]:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_prompt_and_response_tokens_join_to_the_tokens_of_the_joined_text(tokenizer):
    """PPO appends sampled tokens to the prompt's; the reward model was trained on the joined text."""
    rng = stories.generator(78, "joint")
    for _ in range(100):
        opening = stories.draw_opening(rng)
        response = stories.draw_response(rng, opening).text
        parts = tokenizer(opening.prompt)["input_ids"] + tokenizer(response, add_special_tokens=False)["input_ids"]
        assert parts == tokenizer(opening.prompt + response)["input_ids"]


def test_quickstart_prompts_are_short_openings_of_untrained_heroes(tokenizer):
    prompts = held_out_prompts(10**6)
    assert len(prompts) >= 256 and len(set(prompts)) == len(prompts)
    lengths = [len(ids) - 1 for ids in tokenizer(prompts)["input_ids"]]  # without <s>
    assert min(lengths) >= 4 and max(lengths) <= 14
    rng = stories.generator(5, "training openings")
    training = {stories.draw_opening(rng).prompt for _ in range(20000)}
    assert not training & set(prompts)


@pytest.mark.ci
def test_reward_model_orders_fresh_pairs():
    tokenizer = AutoTokenizer.from_pretrained(TINY / "reward")
    model = AutoModelForSequenceClassification.from_pretrained(TINY / "reward", dtype=torch.float32).eval()
    rng = stories.generator(4242, "fresh pairs")
    pairs = [asdict(stories.draw_pair(rng, held_out=True)) for _ in range(200)]
    tokens = encode_pairs(pairs, lambda text: tokenizer(text)["input_ids"], tokenizer.eos_token_id, 512)
    chosen, rejected = score_pairs(model, tokens, tokenizer.pad_token_id)
    assert (chosen > rejected).float().mean() >= 0.85
    scores = torch.cat([chosen, rejected])
    assert abs(scores.mean()) < 0.4 and 0.6 < scores.std() < 1.6


@pytest.mark.ci
def test_sampled_texts_end_by_themselves_with_a_long_tail(actor):
    tokenizer = AutoTokenizer.from_pretrained(TINY / "actor", padding_side="left")
    prompts = tokenizer(held_out_prompts(128), return_tensors="pt", padding=True)
    torch.manual_seed(0)
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    output = actor.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=384)
    responses = output[:, ids.shape[1] :]
    ended = (responses == tokenizer.eos_token_id).any(dim=1)
    lengths = torch.where(ended, (responses == tokenizer.eos_token_id).int().argmax(dim=1) + 1, responses.shape[1])
    p50, p99 = np.percentile(lengths.numpy(), [50, 99])
    assert p99 / p50 >= 4
    assert 20 <= p50 <= 60
    assert (~ended).float().mean() <= 0.03


@pytest.mark.slow
def test_a_short_run_makes_loadable_models(programs, tmp_path):
    out, prompts = tmp_path / "tiny", tmp_path / "prompts.jsonl"
    sizes = ("--steps", 3, "--stories", 300, "--pairs", 20, "--samples", 2, "--threads", 1)
    done = programs.tool("make_tiny_models", "--out", out, "--prompts", prompts, *sizes)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "actor", "reward"]
    AutoTokenizer.from_pretrained(out / "actor")
    AutoModelForCausalLM.from_pretrained(out / "actor")
    assert AutoModelForSequenceClassification.from_pretrained(out / "reward").config.num_labels == 1
    assert "p99 / p50" in (out / "README.md").read_text()
    assert all("prompt" in json.loads(line) for line in prompts.read_text().splitlines())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl", "tiny"]  # nothing left beside


@pytest.mark.parametrize("tool", ["make_tiny_models", "make_sums"])
def test_what_is_there_and_no_steps_are_refused(tmp_path, tool):
    (tmp_path / "mine").touch()
    for words, message in (((tmp_path,), "--force"), ((tmp_path / "x", "--steps", 0), "--steps 0")):
        refused = call_tool(tool, "--prompts", tmp_path / "prompts", "--out", *words)
        assert refused.returncode == 2 and message in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
