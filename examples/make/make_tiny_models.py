"""Make the embedded tiny models from nothing: text, tokenizer, actor, preference pairs, reward model.

    python examples/make/make_tiny_models.py --out examples/tiny --prompts examples/prompts/quickstart.jsonl --force

Everything is generated from --seed by examples/make/stories.py; nothing is downloaded. Writes OUT/actor and
OUT/reward (Hugging Face layout, weights in bfloat16), OUT/README.md with what was measured on the models as
saved, and, with --prompts, a file of openings that no training story has.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import stories
import torch
from preferences import encode_pairs, score_pairs, score_texts, train_reward
from pretraining import Pretraining, pack, say
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
)
from transformers.utils import logging as quiet

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import check_output_folder, output_folder
from rlhfuse.tools.program import run_program  # pyright: ignore[reportMissingImports]

BOS, EOS, PAD = 0, 1, 2
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
VOCAB = 768
CONTEXT = 512
MAX_RESPONSE_TOKENS = 384


@dataclass(frozen=True)
class Recipe:
    """All that decides the result; `steps` are optimizer steps of the actor, `batch_windows` * 512 tokens each."""

    seed: int = 1
    stories: int = 25000
    steps: int = 600
    batch_windows: int = 4
    lr: float = 3e-3
    pairs: int = 3000
    label_noise: float = 0.03
    samples: int = 512
    prompts: int = 512


@dataclass(frozen=True)
class Measured:
    """What the saved models do. Lengths are response tokens, end of text included, at temperature 1."""

    actor_parameters: int
    reward_parameters: int
    weight_bytes: int
    actor_loss: float
    reward_accuracy: float
    samples: int
    length_p50: float
    length_p90: float
    length_p99: float
    length_max: int
    truncated_share: float
    score_mean: float
    score_std: float
    score_length_correlation: float
    seconds: float


def train_tokenizer(
    texts: list[str], folder: Path, vocab: int = VOCAB, context: int = CONTEXT, single_digits: bool = False
) -> None:
    """Byte-level BPE with <s> in front of every text; writes tokenizer.json and tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, cut]) if single_digits else cut
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
    )


def actor_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def train_actor(recipe: Recipe, folder: Path) -> float:
    """Train tokenizer and actor on generated stories and save them in `folder`; the last training loss."""
    rng = stories.generator(recipe.seed, "stories")
    texts = [stories.draw_story(rng) for _ in range(recipe.stories)]
    train_tokenizer(texts[:20000], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokens = [ids + [EOS] for ids in tokenizer(texts)["input_ids"]]
    say(f"actor: {len(texts)} stories, {sum(map(len, tokens))} tokens, {len(tokenizer)} token kinds")
    pretraining = Pretraining(recipe.seed, recipe.steps, recipe.batch_windows, recipe.lr)
    return pretraining.run(actor_config(), pack(tokens, CONTEXT), folder)


def train_reward_model(recipe: Recipe, actor: Path, folder: Path) -> None:
    """Draw preference pairs, train the actor's trunk with a new scalar head on them and save it in `folder`."""
    rng = stories.generator(recipe.seed, "pairs")
    pairs = [asdict(stories.draw_pair(rng, noise=recipe.label_noise)) for _ in range(recipe.pairs)]
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(actor, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(
        actor, num_labels=1, dtype=torch.float32, trust_remote_code=False
    )
    tokens = encode_pairs(pairs, lambda text: tokenizer(text)["input_ids"], EOS)
    say(f"reward: {len(tokens)} pairs, {count_parameters(model)} parameters")
    say(str(train_reward(model, tokens, PAD, recipe.seed)))
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sample(
    actor: Path, prompts: list[str], seed: int, max_new_tokens: int = MAX_RESPONSE_TOKENS, batch: int = 128
) -> list[tuple[list[int], list[int]]]:
    """One response per prompt at temperature 1, as (prompt ids, response ids with end of text)."""
    tokenizer = AutoTokenizer.from_pretrained(actor, padding_side="left", trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(actor, dtype=torch.float32, trust_remote_code=False).eval()
    torch.manual_seed(seed)
    results = []
    for start in range(0, len(prompts), batch):
        encoded = tokenizer(prompts[start : start + batch], return_tensors="pt", padding=True)
        width = encoded["input_ids"].shape[1]
        output = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
        )
        for row, mask in zip(output.tolist(), encoded["attention_mask"].tolist()):
            response = row[width:]
            end = response.index(EOS) + 1 if EOS in response else len(response)
            results.append((row[width - sum(mask) : width], response[:end]))
    return results


def measure(recipe: Recipe, actor: Path, reward: Path, actor_loss: float, started: float) -> tuple[Measured, list[str]]:
    """Facts about the models as saved, and some sampled texts."""
    prompts = stories.draw_prompts(stories.generator(recipe.seed, "sampling"), recipe.samples)
    samples = sample(actor, prompts, recipe.seed)
    lengths = np.array([len(response) for _, response in samples])
    truncated = np.array([response[-1] != EOS for _, response in samples])
    tokenizer = AutoTokenizer.from_pretrained(reward, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(
        reward, dtype=torch.float32, trust_remote_code=False
    ).eval()
    with torch.no_grad():
        scores = torch.cat([score_texts(model, [prompt + response], PAD) for prompt, response in samples]).numpy()
    rng = stories.generator(recipe.seed, "held-out pairs")
    pairs = [asdict(stories.draw_pair(rng, held_out=True)) for _ in range(500)]
    tokens = encode_pairs(pairs, lambda text: tokenizer(text)["input_ids"], EOS)
    chosen, rejected = score_pairs(model, tokens, PAD)
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
    facts = Measured(
        actor_parameters=count_parameters(AutoModelForCausalLM.from_pretrained(actor, trust_remote_code=False)),
        reward_parameters=count_parameters(model),
        weight_bytes=sum((folder / "model.safetensors").stat().st_size for folder in (actor, reward)),
        actor_loss=actor_loss,
        reward_accuracy=float((chosen > rejected).float().mean()),
        samples=len(samples),
        length_p50=float(p50),
        length_p90=float(p90),
        length_p99=float(p99),
        length_max=int(lengths.max()),
        truncated_share=float(truncated.mean()),
        score_mean=float(scores.mean()),
        score_std=float(scores.std()),
        score_length_correlation=float(np.corrcoef(scores, lengths)[0, 1]) if lengths.std() > 0 else 0.0,
        seconds=time.perf_counter() - started,
    )
    shown = [
        f"{score:+.2f}  {tokenizer.decode(prompt + response, skip_special_tokens=True)}"
        for (prompt, response), score in zip(samples, scores.tolist())
        if len(response) < 60
    ]
    return facts, shown[:6]


def model_card(recipe: Recipe, facts: Measured, shown: list[str]) -> str:
    texts = "\n".join(f"    {line}" for line in shown)
    lengths = f"{facts.length_p50:.0f} / {facts.length_p90:.0f} / {facts.length_p99:.0f} / {facts.length_max}"
    return f"""# The embedded tiny models

`actor/` is a Llama-shaped language model that writes very short stories and ends them by itself; `reward/` is
the same trunk with a scalar head (`AutoModelForSequenceClassification`, one label) that prefers stories in
which glad things happen. A text is scored with its end-of-text token. Both are stored in bfloat16, are meant
to be computed in float32, and were trained from nothing by

    python examples/make/make_tiny_models.py --out examples/tiny --seed {recipe.seed} --steps {recipe.steps}

on text from `examples/make/stories.py`. This page is written by that program. They are toys: they know the
grammar that wrote their text and nothing else.

| measured on the saved models | |
|---|---|
| shape | 4 layers, hidden 128, 4 heads, 2 KV heads, head_dim 32, MLP 512, vocabulary {VOCAB}, context 512 |
| parameters, actor / reward | {facts.actor_parameters} / {facts.reward_parameters} |
| weights on disk, together | {facts.weight_bytes / 1e6:.2f} MB |
| actor's training loss at the end | {facts.actor_loss:.3f} nats per token |
| reward: pairs in the right order | {facts.reward_accuracy:.1%} of 500 (openings never trained on, no label noise) |
| response tokens, p50 / p90 / p99 / max | {lengths} |
| p99 / p50 | {facts.length_p99 / facts.length_p50:.1f} |
| truncated at {MAX_RESPONSE_TOKENS} response tokens | {facts.truncated_share:.1%} |
| score of samples, mean / standard deviation | {facts.score_mean:+.2f} / {facts.score_std:.2f} |
| correlation of score and length | {facts.score_length_correlation:+.2f} |
| time of the whole rebuild | {facts.seconds / 60:.1f} minutes, {torch.get_num_threads()} threads |

Lengths and scores: {facts.samples} responses at temperature 1 to held-out openings, end of text included. The head
of the reward model was rescaled after training to a standard deviation of one over its held-out texts.

Some responses, each after its score:

{texts}
"""


def count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_prompts(path: Path, recipe: Recipe) -> None:
    """The quick start's prompts, one {"prompt": text} per line, written beside and renamed."""
    prompts = stories.draw_prompts(stories.generator(recipe.seed, "prompts"), recipe.prompts)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    os.replace(beside, path)


def build(recipe: Recipe, out: Path, force: bool) -> Measured:
    """Make everything in a folder beside `out`, measure, write the card, put it in place."""
    started = time.perf_counter()
    with output_folder(out, force) as folder:
        actor, reward = folder / "actor", folder / "reward"
        actor.mkdir()
        loss = train_actor(recipe, actor)
        say(f"actor done after {time.perf_counter() - started:.0f} s")
        train_reward_model(recipe, actor, reward)
        say(f"reward done after {time.perf_counter() - started:.0f} s")
        facts, shown = measure(recipe, actor, reward, loss, started)
        card = model_card(recipe, facts, shown)
        (folder / "README.md").write_text(card)
    say(card)
    return facts


def parse_arguments() -> argparse.Namespace:
    recipe = Recipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for actor/, reward/ and README.md")
    parser.add_argument("--prompts", type=Path, help="also write this jsonl file of held-out openings")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--stories", type=int, default=recipe.stories, help="stories in the actor's training text")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="optimizer steps of the actor (%(default)s)")
    parser.add_argument("--pairs", type=int, default=recipe.pairs, help="preference pairs (%(default)s)")
    parser.add_argument("--samples", type=int, default=recipe.samples, help="texts sampled for the card (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace an existing --out")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    for name, low in (("stories", 100), ("steps", 1), ("pairs", 10), ("samples", 2), ("threads", 1)):
        if getattr(arguments, name) < low:
            raise InputError(f"--{name} {getattr(arguments, name)} must be at least {low}")
    check_output_folder(arguments.out, arguments.force)
    torch.set_num_threads(arguments.threads)
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    recipe = Recipe(
        seed=arguments.seed,
        stories=arguments.stories,
        steps=arguments.steps,
        pairs=arguments.pairs,
        samples=arguments.samples,
    )
    build(recipe, arguments.out, arguments.force)
    if arguments.prompts:
        write_prompts(arguments.prompts, recipe)


if __name__ == "__main__":
    run_program(main)
