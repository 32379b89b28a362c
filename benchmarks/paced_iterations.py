"""Whole iterations of the paper's model pairs on paced ranks: what either fusion and both gain (Figures 7 and 8).

One fused group of the paper's 256 GPUs, with its share of the batch: 8 or 16 ranks of 8 GPUs. Samples end at random, so
that lengths are geometric: p99.9 is six medians here, where Figure 2 has ten and more. Each run is written down as it
ends.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml
from harness import DATA, Figure, Measurement, named
from paced_costs import STAGES, Pair, paced_cost
from paper.settings import MAX_PROMPT, MINIBATCHES, PAIRS, RANGES
from processes import train
from random_models import write_llama

from rlhfuse.base.files import write_json, write_text
from rlhfuse.costs.paced import PacedCost
from rlhfuse.simulator.lengths import SampleLengths

ENDS, VOCAB = 4, 512  # tokens that end a response, of so many
STRETCHES = {"P": 4.0, "K": 12.0}  # padded and packed, of 8 ranks: most actions then last 20 ms and more
MODES = {
    "base": ["fusion.inter_stage=false", "fusion.intra_stage=serial"],
    "inter": ["fusion.intra_stage=serial"],
    "intra": ["fusion.inter_stage=false"],
    "both": [],
}
SECONDS = {"gen_infer": "fusion/gen_infer_seconds", "training": "timing_s/train", "iteration": "timing_s/step"}
SHAPE = dict(hidden_size=32, num_attention_heads=1, num_key_value_heads=1, head_dim=32, intermediate_size=64)
SHAPE |= dict(vocab_size=VOCAB, max_position_embeddings=2048, eos_token_id=2, bos_token_id=1)
TOKENIZER = DATA / "stories260K-hf"


@dataclass(frozen=True)
class Cell:
    """One pair, padded or packed, and how large it is run."""

    pair: Pair
    variant: str
    stages: tuple[int, int]
    sequences: int = 16  # of an instance: 512 samples on 32 of them
    longest: int = 1024
    minibatches: int = MINIBATCHES

    @staticmethod
    def of(pair: Pair, variant: str) -> Cell:
        return Cell(pair, variant, (STAGES[pair[0]], STAGES[pair[1]]))

    @property
    def name(self) -> str:
        return f"{'_'.join(self.pair)}.{self.variant.lower()}"

    @property
    def ranks(self) -> int:
        return max(self.stages)

    @property
    def stretch(self) -> float:
        """Sixteen ranks take more of two cores than eight do."""
        return STRETCHES[self.variant] * (1.5 if self.ranks > 8 else 1)

    def write(self, folder: Path) -> None:
        """Models, prompts, prices and run.yaml."""
        samples, prompt = self.sequences * self.ranks, min(MAX_PROMPT, self.longest)
        lengths = draw_lengths(samples, prompt, self.longest)
        for name, layers, head in (("actor", self.stages[0], False), ("critic", self.stages[1], True)):
            write_llama(folder / name, 1 + head, head, TOKENIZER, num_hidden_layers=layers, **SHAPE)
        texts = [" ".join(["the"] * max(1, length - 1)) for length in lengths.prompt]  # a token each, and the first
        write_text(folder / "prompts.jsonl", "".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        pairs = "".join(f"{one},{other}\n" for one, other in zip(lengths.prompt, lengths.output))
        write_text(folder / "lengths.csv", f"num_prefill_tokens,num_decode_tokens\n{pairs}")
        cost = paced_cost(self.pair, self.sequences, lengths, self.longest, self.variant == "P")
        write_json(folder / "pace.json", of_stages(cost, self.stages).to_dict())
        write_text(folder / "run.yaml", yaml.safe_dump(self._config(folder, samples, prompt)))

    def _config(self, folder: Path, samples: int, prompt: int) -> dict[str, Any]:
        actor, critic = (f"d{self.ranks // count}t1p{count}" for count in self.stages)
        microbatches = samples // self.minibatches * self.stages[0] // self.ranks  # of one sample
        return {
            "actor": {"path": str(folder / "actor")},
            "critic": {"path": str(folder / "critic")},
            "reward": {"path": str(folder / "critic")},
            "data": {"train_files": [str(folder / "prompts.jsonl")], "max_prompt_tokens": prompt},
            "rollout": {
                "prompts_per_iteration": samples,
                "samples_per_prompt": 1,
                "max_response_tokens": self.longest,
                "stop_token_ids": [*range(3, 2 + ENDS)],
                "draft_rows": 0,
                "max_batched_tokens": 2048 if self.variant == "P" else 8192,  # of a pack too; padded ones are longer
            },
            "algorithm": {"minibatches": self.minibatches},
            "fusion": {"actor_microbatches": microbatches, "search_seconds": 20.0},
            "parallel": {
                "actor_train": actor,
                "critic_train": critic,
                "generation": f"d{self.ranks}t1p1",
                "inference": f"d{self.ranks}t1p1",
                "lengths": str(folder / "lengths.csv"),
            },
            "trainer": {
                "device": "cpu",
                "pace": str(folder / "pace.json"),
                "pace_stretch": self.stretch,
                "tensorboard": False,
                "export": False,
                "return_memory": False,
                "memory_limit_gb": 100.0,  # of a rank: of sixteen that share what they have loaded
            },
        }


QUICK = Cell(("13B", "13B"), "P", (2, 1), sequences=4, longest=24, minibatches=2)


def draw_lengths(samples: int, longest_prompt: int, longest: int) -> SampleLengths:
    """Lognormal prompts, and responses that end at any token alike."""
    generator = np.random.default_rng(1)
    prompts = np.exp(generator.normal(math.log(150), 0.8, samples)).clip(2, longest_prompt)
    outputs = generator.geometric(ENDS / VOCAB, samples).clip(1, longest)
    return SampleLengths(tuple(map(int, prompts)), tuple(map(int, outputs)))


def of_stages(cost: PacedCost, stages: tuple[int, int]) -> PacedCost:
    """With the first so many stages of each model: all have as many layers, or nearly."""
    counts: dict[str, int] = dict(zip(("actor", "critic"), stages))
    kept = {role: replace(price, stages=price.stages[: counts[role]]) for role, price in cost.training.items()}
    return replace(cost, training=kept)


class Journal:
    """Runs that have ended, a line each, in a file that a later start goes on with."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.runs = dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}

    def add(self, key: str, run: dict[str, Any]) -> None:
        self.runs[key] = run
        with self._file.open("a") as stream:
            stream.write(json.dumps([key, run]) + "\n")


def iterate(arguments: argparse.Namespace) -> None:
    known = {f"{'/'.join(pair)}:{variant}": Cell.of(pair, variant) for pair in PAIRS for variant in STRETCHES}
    cells = named("--cells", ",".join(known) if arguments.cells == "all" else arguments.cells, known)
    cells = [QUICK] if arguments.quick else cells
    measurement = Measurement("paced_iterations", arguments)
    with TemporaryDirectory() as folder:
        journal = Journal(Path(arguments.journal or f"{folder}/runs.jsonl"))
        rows = [row for cell in cells for row in measure(cell, Path(folder) / cell.name, journal, measurement)]
    columns = ("pair", "batches", "mode", "gen + inf", "planned", "train", "planned", "iteration")
    columns += ("Gen+Inf", "Train", "end to end", "Train, barrier", "CPU", "late", "Python at x1", "evidence")
    ranges = ", ".join(f"{name} {low}-{high}" for name, (low, high) in RANGES.items())
    measurement.table("iterations", f"Seconds of a cluster, and over base; paper: {ranges}", columns, rows)
    measurement.facts(runs=journal.runs, ranges={name: list(limits) for name, limits in RANGES.items()})
    measurement.finish()


def measure(cell: Cell, folder: Path, journal: Journal, measurement: Measurement) -> list[list[str]]:
    """A row for each mode; those that the journal has are not run again."""
    folder.mkdir()
    cell.write(folder)
    found = {}
    for mode, settings in MODES.items():
        if f"{cell.name}.{mode}" not in journal.runs:
            journal.add(f"{cell.name}.{mode}", run(cell, folder, mode, settings))
        found[mode] = journal.runs[f"{cell.name}.{mode}"]
        last = found[mode]
        measurement.say(f"{cell.name} {mode}: {last['iteration']:.1f} s, {last['paced']}")
    if len({one["digest"] for one in found.values()}) != 1:
        raise RuntimeError(f"{cell.name}: modes generated different samples")
    return [row(cell, mode, one, found["base"], measurement) for mode, one in found.items()]


def run(cell: Cell, folder: Path, mode: str, settings: list[str]) -> dict[str, Any]:
    """One iteration: seconds as they were, and as planned."""
    (last,) = train(folder / "run.yaml", folder / mode, ["trainer.iterations=1", *settings], ranks=cell.ranks)
    plan = json.loads((folder / mode / "plan.json").read_text())["seconds"]
    planned = {f"{name}.planned": plan[f"{name}_fused"] for name in ("gen_infer", "training")}
    paced = {key: value for key, value in last.items() if key.startswith("paced")}
    outputs = SampleLengths(tuple(last["lengths/prompt"]), tuple(last["lengths/output"])).percentiles()
    facts = {"digest": last["rollout/digest"], "threshold": last["fusion/threshold"], "output": outputs}
    facts |= {"reshard": last["timing_s/reshard"], "barrier": plan["training_serial"]}
    return {**{name: last[key] for name, key in SECONDS.items()}, **planned, **paced, **facts}


def row(cell: Cell, mode: str, one: Mapping[str, Any], base: Mapping[str, Any], measurement: Measurement) -> list[str]:
    """Seconds of a cluster, in which the stretch is taken back. A base with a barrier between its models, as the
    paper's Table 3 has it, takes longer than ours: its training is of the plan."""
    stretch, figures = cell.stretch, measurement.part(f"{cell.name}.{mode}")
    gains = {name: figures.figure(name, Figure(base[name] / one[name], "x")).value for name in SECONDS}
    gains["barrier"] = figures.value("training_over_barrier", Figure(one["barrier"] / one["training"], "x"))
    figures.figure("evidence", float(one["paced"].endswith(": evidence")))
    keys = ("gen_infer", "gen_infer.planned", "training", "training.planned", "iteration")
    shown = [f"{one[key] / stretch:.2f} s" for key in keys]
    over = ["" if mode == "base" else f"{gain:.2f}" for gain in gains.values()]
    shares = [f"{one[f'paced/{key}']:.{places}%}" for key, places in (("machine_cpu_share", 0), ("late_share", 2))]
    ends = [*shares, f"{one['paced/python_share']:.0%}", "yes" if one["paced"].endswith(": evidence") else "no"]
    return ["/".join(cell.pair), "padded" if cell.variant == "P" else "packed", mode, *shown, *over, *ends]
