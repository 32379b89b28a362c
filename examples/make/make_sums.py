"""Make the little sums of examples/sums_grpo.yaml from nothing: prompt files, tokenizer, and a model to begin with.

    python examples/make/make_sums.py --out examples/sums --prompts examples/prompts --force

Everything is generated from --seed by examples/make/sums.py; nothing is downloaded. Writes sums_train.jsonl and
sums_held_out.jsonl (rows {question, answer} as GSM8K's) into the folder of prompts, and OUT (Hugging Face layout,
bfloat16, with README.md) unless it is left away. The model is taught none of the questions of either file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from make_tiny_models import BOS, EOS, PAD, count_parameters, sample, train_tokenizer
from pretraining import Pretraining, pack, say
from stories import generator
from sums import Sum, draw_different
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as quiet

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import check_output_folder, output_folder, write_text
from rlhfuse.data.gsm8k import exact_match
from rlhfuse.tools.program import run_program  # pyright: ignore[reportMissingImports]

VOCAB = 448
CONTEXT = 128
MAX_RESPONSE_TOKENS = 40


@dataclass(frozen=True)
class Recipe:
    """All that decides the result; `steps` are optimizer steps of `batch_windows` * 128 tokens each."""

    seed: int = 1
    train: int = 512
    held_out: int = 128
    taught: int = 60000
    guesses: float = 0.6  # share of the taught questions that are answered by a guess
    steps: int = 1000
    batch_windows: int = 16
    lr: float = 4e-3


def draw_files(recipe: Recipe) -> tuple[list[Sum], list[Sum]]:
    """The sums of the training file and of the held-out one; no question is in both, or twice in one."""
    drawn = draw_different(generator(recipe.seed, "sums"), recipe.train + recipe.held_out)
    return drawn[: recipe.train], drawn[recipe.train :]


def rows(sums: list[Sum]) -> str:
    """JSON lines {question, answer}."""
    lines = [{"question": one.question, "answer": one.solution()} for one in sums]
    return "".join(json.dumps(line) + "\n" for line in lines)


def taught(recipe: Recipe) -> list[tuple[str, str]]:
    """Questions, none of them in a prompt file, each with a guess or a worked solution."""
    kept = {one.question for part in draw_files(recipe) for one in part}
    rng = generator(recipe.seed, "taught")
    drawn = (one for one in draw_different(rng, recipe.taught + len(kept)) if one.question not in kept)
    return [
        (one.question, "\n" + (one.guess(rng) if rng.random() < recipe.guesses else one.solution()))
        for one in islice(drawn, recipe.taught)
    ]


def pretrained_tokenizer(
    texts: list[str], folder: Path, context: int, template: str = "", marks: Sequence[str] = ()
) -> Any:
    """A tokenizer of VOCAB tokens, digits one by one, saved in `folder`; `marks` are tokens of their own."""
    train_tokenizer(texts, folder, VOCAB - len(marks), context, True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if marks:
        tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    return tokenizer


def small_llama(context: int) -> LlamaConfig:
    """A Llama of 205,248 parameters."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def train(recipe: Recipe, folder: Path) -> float:
    """Train tokenizer and model and save them in `folder`; the last training loss in nats per token of an answer."""
    questions, answers = zip(*taught(recipe))
    tokenizer = pretrained_tokenizer([one + other for one, other in zip(questions, answers)][:20000], folder, CONTEXT)
    prompts = tokenizer(list(questions))["input_ids"]  # as PPO does, encoded without the response
    responses = tokenizer(list(answers), add_special_tokens=False)["input_ids"]
    texts = [prompt + response + [EOS] for prompt, response in zip(prompts, responses)]
    windows = pack(texts, CONTEXT, given=[[(0, len(prompt))] for prompt in prompts])
    training = Pretraining(recipe.seed, recipe.steps, recipe.batch_windows, recipe.lr)
    return training.run(small_llama(CONTEXT), windows, folder)


def model_card(recipe: Recipe, folder: Path, loss: float, started: float) -> str:
    """Facts about the model as saved, measured on the held-out questions."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    sums, answers = draw_files(recipe)[1], []
    for copy in range(4):
        sampled = sample(folder, [one.question for one in sums], recipe.seed + copy, MAX_RESPONSE_TOKENS)
        answers += [tokenizer.decode(response, skip_special_tokens=True) for _, response in sampled]
    right = [exact_match("sums", text, one.solution()) for text, one in zip(answers, sums * 4)]
    shown = "\n\n".join(f"    {one.question}{text}".replace("\n", "\n    ") for one, text in zip(sums[:3], answers))
    options = f"--seed {recipe.seed} --steps {recipe.steps}"
    return f"""# A model that does little sums when it takes the trouble

A Llama-shaped model that works out little sums in words line by line, and gives the answer after `####` as GSM8K does.
Of the answers that it was taught {recipe.guesses:.0%} are guesses without working, so it guesses too, until
reinforcement learning finds that working it out pays. It is stored in bfloat16, is meant to be computed in float32,
and was trained from nothing by

    python examples/make/make_sums.py --out examples/sums --prompts examples/prompts {options}

on text from `examples/make/sums.py`. This page is written by that program.

| measured on the saved model | |
|---|---|
| shape | 3 layers, hidden 64, 4 heads, 2 KV heads, head_dim 16, MLP 192, vocabulary {VOCAB}, context {CONTEXT} |
| parameters | {count_parameters(LlamaForCausalLM.from_pretrained(folder))} |
| weights on disk | {(folder / "model.safetensors").stat().st_size / 1e6:.2f} MB |
| training loss at the end | {loss:.3f} nats per token of an answer |
| held-out sums right, sampled at temperature 1 | {sum(right) / len(right):.1%} of {len(right)} |
| time of the rebuild | {(time.perf_counter() - started) / 60:.1f} minutes, {torch.get_num_threads()} threads |

Some questions with what it wrote:

{shown}
"""


def build(recipe: Recipe, out: Path, force: bool) -> None:
    """Make the model in a folder beside `out`, measure, write the card, put it in place."""
    started = time.perf_counter()
    with output_folder(out, force) as folder:
        loss = train(recipe, folder)
        card = model_card(recipe, folder, loss, started)
        (folder / "README.md").write_text(card)
    say(card)


def parse_arguments(about: str, seed: int, steps: int) -> argparse.Namespace:
    """Arguments of a program that makes a model and two prompt files, checked; torch has its threads, transformers is
    quiet. Raises InputError."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the model; none = only the prompt files")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of the two prompt files")
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps of the model (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace an existing model in --out")
    arguments = parser.parse_args()
    for name in ("steps", "threads"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name} {getattr(arguments, name)} must be at least 1")
    torch.set_num_threads(arguments.threads)
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    return arguments


def main() -> None:
    arguments = parse_arguments(str(__doc__), Recipe.seed, Recipe.steps)
    if arguments.out:
        check_output_folder(arguments.out, arguments.force)
    recipe = Recipe(seed=arguments.seed, steps=arguments.steps)
    for name, sums in zip(("train", "held_out"), draw_files(recipe)):
        write_text(arguments.prompts / f"sums_{name}.jsonl", rows(sums))
    if arguments.out:
        build(recipe, arguments.out, arguments.force)


if __name__ == "__main__":
    run_program(main)
