"""Train a reward model on preference pairs (Bradley-Terry), from a Hugging Face checkpoint.

    python tools/train_reward.py --model examples/tiny/actor --pairs pairs.jsonl --out runs/reward

`--pairs` is a jsonl file of {"prompt": text, "chosen": text, "rejected": text}; prompt and response are
joined as they stand, and the end-of-text token is added. A share of the pairs is held out, and the share
of those in the right order is printed. The result loads as AutoModelForSequenceClassification with
num_labels=1. One process; made for models that train on one machine.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from reward_training import RewardResult, RewardSettings, encode_pairs, read_pairs, train_reward
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as quiet

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.base.files import check_output_folder, output_folder
from rlhfuse.models.tokenizer import read_tokenizer


@dataclass(frozen=True)
class RewardJob:
    """One run of this program: where from, where to, and how."""

    model: Path
    pairs: Path
    out: Path
    settings: RewardSettings
    dtype: torch.dtype = torch.bfloat16  # of the saved weights; training is in float32
    force: bool = False


def run_job(job: RewardJob) -> RewardResult:
    """Train, measure and save. Raises InputError before any work if an input or the output is unusable."""
    check_output_folder(job.out, job.force)
    pairs = read_pairs(job.pairs)
    torch.manual_seed(job.settings.seed)
    tokenizer, model = load(job.model)
    tokens = encode_pairs(
        pairs,
        lambda text: tokenizer(text)["input_ids"],
        tokenizer.eos_token_id,
        model.config.max_position_embeddings,
    )
    print(f"reward: {len(tokens)} pairs, {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    result = train_reward(model, tokens, model.config.pad_token_id, job.settings, lambda line: print(line, flush=True))
    with output_folder(job.out, job.force) as folder:
        model.to(job.dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return result


def load(path: Path):
    """Tokenizer and scalar-headed model in float32; the head is new unless the checkpoint has one."""
    if not (path / "config.json").is_file():
        raise InputError(f"--model {path} holds no config.json; give the path of a Hugging Face model folder")
    try:
        tokenizer = read_tokenizer(path)
        model = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=torch.float32, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise InputError(f"--model {path} does not load: {error}") from None
    if tokenizer.eos_token_id is None:
        raise InputError(f"--model {path}: its tokenizer has no end-of-text token, where a text is scored")
    # The text is scored at its last token that is not padding: were padding the end of text, at the one before it.
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.unk_token_id
    if pad is None or pad == tokenizer.eos_token_id:
        raise InputError(f"--model {path}: its tokenizer needs a padding token other than the end of text ({pad})")
    model.config.pad_token_id = pad
    return tokenizer, model


def parse_arguments() -> argparse.Namespace:
    defaults = RewardSettings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder to start from, with tokenizer")
    parser.add_argument("--pairs", type=Path, required=True, help="jsonl file of prompt, chosen, rejected")
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--lr", type=float, default=defaults.lr, help="peak learning rate (default %(default)s)")
    parser.add_argument("--batch-pairs", type=int, default=defaults.batch_pairs, help="pairs per optimizer step")
    parser.add_argument("--eval-fraction", type=float, default=defaults.eval_fraction, help="share held out")
    parser.add_argument("--center-coef", type=float, default=defaults.center_coef, help="zero-mean penalty")
    parser.add_argument("--keep-scale", action="store_true", help="do not rescale scores to standard deviation 1")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the saved weights")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--threads", type=int, default=0, help="torch threads (0: torch's choice)")
    parser.add_argument("--force", action="store_true", help="replace an existing --out")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    settings = RewardSettings(
        epochs=arguments.epochs,
        lr=arguments.lr,
        batch_pairs=arguments.batch_pairs,
        eval_fraction=arguments.eval_fraction,
        center_coef=arguments.center_coef,
        unit_scale=not arguments.keep_scale,
        seed=arguments.seed,
    )
    if arguments.threads < 0:
        raise InputError(f"--threads {arguments.threads} must not be negative")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()  # a new head and a dropped output layer are meant here
    dtype = getattr(torch, arguments.dtype)
    job = RewardJob(arguments.model, arguments.pairs, arguments.out, settings, dtype, arguments.force)
    print(run_job(job), flush=True)


if __name__ == "__main__":
    run_program(main)
