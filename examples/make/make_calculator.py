"""Make the example of a calculator, examples/calculator_grpo.yaml, from nothing: prompts, tokenizer, and a model.

    python examples/make/make_calculator.py --out examples/calculator --prompts examples/prompts --force

Everything is generated from --seed; nothing is downloaded. Writes calculator_train.jsonl and calculator_held_out.jsonl
(chat turns, and the answer as GSM8K's) into the folder of prompts, and OUT (Hugging Face layout, bfloat16, with
README.md) unless it is left away: beside the tool that lies there, which it does not touch. The model is taught none of
the questions of either file.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from make_sums import parse_arguments, pretrained_tokenizer, small_llama
from make_tiny_models import EOS, count_parameters, sample
from pretraining import Pretraining, pack, say
from stories import generator
from sums import LESS, MORE, PEOPLE, QUESTIONS, THINGS
from transformers import AutoTokenizer, LlamaForCausalLM

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_text
from rlhfuse.data.gsm8k import exact_match
from rlhfuse.tools.program import run_program  # pyright: ignore[reportMissingImports]

CONTEXT = 160
MAX_RESPONSE_TOKENS = 96
LARGEST = 999
FARTHEST_GUESS = 60
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = """\
{%- for turn in messages %}
{%- if turn.role == 'user' %}
{{- bos_token + turn.content + '\\n' }}
{%- elif turn.role == 'assistant' %}
{{- turn.content or '' }}
{%- for call in turn.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- eos_token }}
{%- else %}
{{- '<tool_response>' + turn.content + '</tool_response>' }}
{%- endif %}
{%- endfor %}
"""


@dataclass(frozen=True)
class Recipe:
    """All that decides the result; `steps` are optimizer steps of `batch_windows` * 160 tokens each."""

    seed: int = 1
    train: int = 512
    held_out: int = 256
    taught: int = 30000
    guesses: float = 0.7  # share of the taught questions that are answered by a guess
    wrong_signs: float = 0.2  # share of the taught calls that ask for the other operation
    steps: int = 1500
    batch_windows: int = 16
    lr: float = 4e-3


@dataclass(frozen=True)
class Calculation:
    """A question about two numbers of up to three digits."""

    question: str
    a: int
    sign: str
    b: int

    @property
    def result(self) -> int:
        return self.a + self.b if self.sign == "+" else self.a - self.b

    @property
    def chat(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]

    def pieces(self, rng: random.Random, recipe: Recipe) -> list[tuple[str, bool]]:
        """What a model is taught to write, and what it observes (False) between: a guess, or a call and its answer."""
        if rng.random() < recipe.guesses:
            guess = rng.randint(max(0, self.result - FARTHEST_GUESS), self.result + FARTHEST_GUESS)
            return [(f"#### {guess}", True)]
        sign = {"+": "-", "-": "+"}[self.sign] if rng.random() < recipe.wrong_signs else self.sign
        value = self.a + self.b if sign == "+" else self.a - self.b
        call = {"name": "calc", "arguments": {"a": self.a, "sign": sign, "b": self.b}}
        asked, answered = f"<tool_call>{json.dumps(call)}</tool_call>", f"<tool_response>{value}</tool_response>"
        return [(asked, True), (answered, False), (f"#### {value}", True)]


def draw_calculation(rng: random.Random) -> Calculation:
    """One whose result lies above 0."""
    name, subject, whom = rng.choice(PEOPLE)
    friend, things = rng.choice([other for other, *_ in PEOPLE if other != name]), rng.choice(THINGS)
    sign, a = rng.choice("+-"), rng.randint(100, LARGEST)
    b = rng.randint(100, LARGEST) if sign == "+" else rng.randint(10, a - 1)
    text = rng.choice(MORE if sign == "+" else LESS)
    happened = text.format(who=subject if rng.random() < 0.5 else name, him=whom, friend=friend, number=b)
    asked = rng.choice(QUESTIONS).format(things=things, name=name, who=subject)
    return Calculation(f"{name} has {a} {things}. {happened[0].upper()}{happened[1:]} {asked}", a, sign, b)


def draw_different(rng: random.Random, count: int, without: frozenset[str] = frozenset()) -> list[Calculation]:
    """`count` of them, no question twice and none of `without`."""
    drawn: dict[str, Calculation] = {}
    while len(drawn) < count:
        one = draw_calculation(rng)
        if one.question not in without:
            drawn[one.question] = one
    return list(drawn.values())


def draw_files(recipe: Recipe) -> tuple[list[Calculation], list[Calculation]]:
    """Those of the training file and of the held-out one."""
    drawn = draw_different(generator(recipe.seed, "calculations"), recipe.train + recipe.held_out)
    return drawn[: recipe.train], drawn[recipe.train :]


def rows(calculations: list[Calculation]) -> str:
    """JSON lines {prompt, answer}."""
    return "".join(json.dumps({"prompt": one.chat, "answer": f"#### {one.result}"}) + "\n" for one in calculations)


def train(recipe: Recipe, folder: Path) -> float:
    """Train tokenizer and model and save them in `folder`; the last training loss in nats per token that is learnt."""
    rng = generator(recipe.seed, "taught")
    kept = frozenset(one.question for part in draw_files(recipe) for one in part)
    taught = [(one, one.pieces(rng, recipe)) for one in draw_different(rng, recipe.taught, kept)]
    written = [one.question + "\n" + "".join(text for text, _ in pieces) for one, pieces in taught]
    tokenizer = pretrained_tokenizer(written[:20000], folder, CONTEXT, TEMPLATE, MARKS)
    texts, given = [], []
    for one, pieces in taught:
        tokens = tokenizer.apply_chat_template(one.chat, add_generation_prompt=True)["input_ids"]
        spans = [(0, len(tokens))]
        for text, drawn in pieces:
            begin = len(tokens)
            tokens = tokens + tokenizer(text, add_special_tokens=False)["input_ids"] + [EOS] * drawn
            spans += [] if drawn else [(begin, len(tokens))]
        texts.append(tokens)
        given.append(spans)
    windows = pack(texts, CONTEXT, given)
    return Pretraining(recipe.seed, recipe.steps, recipe.batch_windows, recipe.lr).run(
        small_llama(CONTEXT), windows, folder
    )


def model_card(recipe: Recipe, folder: Path, loss: float, started: float) -> str:
    """Facts about the model as saved, measured on the held-out questions without a tool."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    held_out = draw_files(recipe)[1]
    drawn = sample(folder, [one.question + "\n" for one in held_out], recipe.seed, MAX_RESPONSE_TOKENS)
    answers = [tokenizer.decode(response, skip_special_tokens=True) for _, response in drawn]
    calls = sum(MARKS[0] in answer for answer in answers) / len(answers)
    guessed = [(answer, one) for answer, one in zip(answers, held_out) if MARKS[0] not in answer]
    right = sum(exact_match("", answer, str(one.result)) for answer, one in guessed)
    shown = "\n\n".join(f"    {one.question}\n    {text}" for one, text in zip(held_out[:4], answers))
    options = f"--seed {recipe.seed} --steps {recipe.steps}"
    return f"""# A model that asks a calculator when it takes the trouble

A Llama-shaped model that adds and subtracts numbers of three digits in words. It was taught to call `calc` of
`tools.py` in {1 - recipe.guesses:.0%} of the questions, a fifth of these with the wrong sign, and to guess in the
others, until reinforcement learning finds that calling pays. It is stored in bfloat16, is meant to be computed in
float32, and was trained from nothing by

    python examples/make/make_calculator.py --out examples/calculator --prompts examples/prompts {options}

This page is written by that program.

| measured on the saved model | |
|---|---|
| shape | 3 layers, hidden 64, 4 heads, 2 KV heads, head_dim 16, MLP 192, vocabulary 448, context {CONTEXT} |
| parameters | {count_parameters(LlamaForCausalLM.from_pretrained(folder))} |
| weights on disk | {(folder / "model.safetensors").stat().st_size / 1e6:.2f} MB |
| training loss at the end | {loss:.3f} nats per token of an answer |
| held-out questions that it asks the calculator, sampled at temperature 1 | {calls:.1%} of {len(answers)} |
| the others right | {right:.0f} of {len(guessed)} |
| time of the rebuild | {(time.perf_counter() - started) / 60:.1f} minutes, {torch.get_num_threads()} threads |

Some questions with what it wrote first:

{shown}
"""


def build(recipe: Recipe, out: Path) -> None:
    """Make the model apart, measure, write the card, then put its files into `out`."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        loss = train(recipe, folder)
        card = model_card(recipe, folder, loss, started)
        (folder / "README.md").write_text(card)
        out.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            shutil.copy(file, out / file.name)
    say(card)


def main() -> None:
    arguments = parse_arguments(str(__doc__), Recipe.seed, Recipe.steps)
    if arguments.out and (arguments.out / "config.json").exists() and not arguments.force:
        raise InputError(f"--out {arguments.out} holds a model; give --force to replace it")
    recipe = Recipe(seed=arguments.seed, steps=arguments.steps)
    for name, calculations in zip(("train", "held_out"), draw_files(recipe)):
        write_text(arguments.prompts / f"calculator_{name}.jsonl", rows(calculations))
    if arguments.out:
        build(recipe, arguments.out)


if __name__ == "__main__":
    run_program(main)
