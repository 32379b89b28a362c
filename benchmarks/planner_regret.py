"""How good the chosen tables of layouts are, measured: all that two ranks can have, run by the trainer.

    python benchmarks/planner_regret.py [--settings balanced,tail]

Two ranks of one thread each train random Llamas of 33 million parameters, with lengths that the planner knows. A run
is a training table (layouts x M1) with one of generation, so that every phase of every table is measured, each by
runs that take turns: the seconds of a table are the sum of its phases, means over the batches that the planner draws.
Prices are of a profile of this machine made before, and of analytic costs.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from harness import ROOT, TRACE, Figure, Measurement, named, options, take_turns
from planner_regret_rank import RANKS
from processes import ALLOCATOR, Ranks, run, torchrun
from random_models import write_llama
from scipy.stats import spearmanr

from rlhfuse.base.errors import InputError
from rlhfuse.config.load import load_config, read_specs
from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.tokenizer import load_tokenizer
from rlhfuse.planning.job import Job
from rlhfuse.planning.price import Price
from rlhfuse.planning.search.search import Ranking
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.search.table import Table, inference_text
from rlhfuse.planning.settle import settle_but_layouts
from rlhfuse.planning.training.drawn_batches import DRAWS
from rlhfuse.simulator.lengths import load_lengths
from rlhfuse.tools.program import run_program

TOKENIZER = ROOT / "examples" / "tiny" / "actor"
PROMPT = "Once upon a time there was a little dog ."  # every sample's
BUDGETS = 1, 4  # most tokens of a micro-batch, in longest samples
WARM = 2  # iterations of a job that are not counted: memory that the second needs first is still new
GENERATING, SCORING, TRAINING, MOVING = "generation", "inference beyond it", "training", "weight moves"
PHASES = {  # and what it is called in a run's metrics
    GENERATING: "timing_s/gen",
    SCORING: "timing_s/infer",
    TRAINING: "timing_s/train",
    MOVING: "timing_s/reshard",
}
PROFILE, ANALYTIC = "profile", "analytic"
REGRET_GOALS = {PROFILE: 1.05, ANALYTIC: 1.15}  # seconds of the chosen table over those of the best
ERROR_GOAL, CORRELATION_GOAL, SPREAD_GOAL = 0.15, 0.8, 1.25
SHAPE = dict(
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=10,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=768,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)
QUICK_SHAPE = {**SHAPE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
QUICK_SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}

Phased = Mapping[str, float]  # seconds by phase


@dataclass(frozen=True)
class Case:
    """A setting: samples of an iteration, and the longest response."""

    name: str
    samples: int
    response: int

    def outputs(self, trace: str, seed: int) -> list[int]:
        """Lengths that responses are drawn from: all alike within a quarter, or a trace's, scaled."""
        if self.name == "balanced":
            return np.random.default_rng(seed).integers(3 * self.response // 4, self.response + 1, 500).tolist()
        outputs = np.array(load_lengths(trace).lengths.output)
        scaled = np.ceil(outputs * (self.response / np.quantile(outputs, 0.999)))
        return np.clip(scaled, 1, self.response).astype(int).tolist()


CASES = {one.name: one for one in (Case("balanced", 16, 32), Case("tail", 16, 160))}
QUICK_CASES = {one.name: one for one in (Case("balanced", 16, 8), Case("tail", 16, 24))}


@dataclass
class Measured:
    """Seconds of iterations, by what they depend on; of each the batch that it had."""

    seconds: dict[tuple, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, table: Table, metrics: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        for batch, row in metrics:
            for phase, name in PHASES.items():
                self.seconds.setdefault((phase, *part_of(table, phase)), []).append((batch, row[name]))

    def of(self, table: Table) -> Phased:
        """Seconds of its phases."""
        return {phase: mean_of(self.seconds[(phase, *part_of(table, phase))]) for phase in PHASES}


def mean_of(seconds: Sequence[tuple[int, float]]) -> float:
    """The mean over batches, of each the median of all iterations that had it."""
    batches: dict[int, list[float]] = {}
    for batch, one in seconds:
        batches.setdefault(batch, []).append(one)
    return statistics.fmean(map(statistics.median, batches.values()))


def part_of(table: Table, phase: str) -> tuple:
    """What the seconds of a phase depend on."""
    generation = str(table.generation), inference_text(table.inference)
    layouts = str(table.actor_train), str(table.critic_train)
    parts = {TRAINING: (*layouts, table.cut.value), MOVING: (*layouts, *generation)}
    return parts.get(phase, generation)


def priced_phases(price: Price) -> Phased:
    alone = price.generation.generation_fused
    assert alone is not None, "R_t is chosen by simulation"
    return {
        GENERATING: alone + price.capture,
        SCORING: price.generation.fused - alone,
        TRAINING: price.schedules + price.steps,
        MOVING: price.moves.seen(price.generation) + price.offload,
    }


def main() -> None:
    arguments = parse_arguments()
    measurement = Measurement("planner_regret", arguments)
    cases = named("--settings", arguments.settings, QUICK_CASES if arguments.quick else CASES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = QUICK_SHAPE if arguments.quick else SHAPE
        write_llama(folder / "actor", 1, False, TOKENIZER, **shape)
        write_llama(folder / "reward", 2, True, TOKENIZER, **shape)
        configs = {case: write_config(folder, case, arguments) for case in cases}
        longest = max(cases, key=lambda case: case.response)  # a profile holds for shorter samples too
        profile = measure_profile(folder, configs[longest], arguments)
        costs = {PROFILE: [f"fusion.profile={profile}"], ANALYTIC: []}
        with Ranks("planner_regret_rank:JobRank", RANKS, ALLOCATOR) as ranks:
            for case, config in configs.items():
                Comparison(measurement, case, config, costs).run(ranks)
    measurement.finish()


def parse_arguments() -> Any:
    parser = options(__doc__, rounds=2)
    parser.add_argument("--settings", default=",".join(CASES), help="[%(default)s]")
    parser.add_argument("--lengths", default=str(TRACE), metavar="FILE", help="of the tail's responses [arXiv's]")
    parser.add_argument("--profile-seconds", type=float, default=120.0, help="for the profile [%(default)s]")
    arguments = parser.parse_args()
    if "tail" in arguments.settings:
        load_lengths(arguments.lengths)  # refused before anything is measured
    if arguments.rounds > DRAWS:
        raise InputError(f"--rounds {arguments.rounds}: rounds share {DRAWS} batches; give at most as many")
    if arguments.quick:
        arguments.rounds, arguments.profile_seconds = 1, 5.0
    return arguments


def write_config(folder: Path, case: Case, arguments: Any) -> Path:
    """The run of a setting with every choice of the search open; samples as its lengths.jsonl says."""
    prompts, lengths = folder / f"{case.name}.prompts.jsonl", folder / f"{case.name}.lengths.jsonl"
    prompts.write_text(case.samples * (json.dumps({"prompt": PROMPT}) + "\n"))
    tokens = prompt_tokens(folder / "actor")
    rows = ({"prompt_length": tokens, "output_length": n} for n in case.outputs(arguments.lengths, arguments.seed))
    lengths.write_text("".join(json.dumps(row) + "\n" for row in rows))
    layouts = "actor_train", "critic_train", "generation"
    config = {
        "actor": {"path": str(folder / "actor")},
        "reward": {"path": str(folder / "reward")},
        "data": {"train_files": [str(prompts)], "max_prompt_tokens": tokens},
        "rollout": {
            "prompts_per_iteration": case.samples,
            "samples_per_prompt": 1,
            "max_response_tokens": case.response,
            "ignore_eos": True,
            "draft_rows": 0,  # nothing can be guessed of a random model's tokens
        },
        "algorithm": {"minibatches": 1},
        "fusion": {"search_seconds": 0.2, "split_backward": "false"},
        "parallel": {**dict.fromkeys(layouts, "auto"), "lengths": str(lengths), "stage_layers": "even"},
        "trainer": {
            "device": "cpu",
            "dtype": "float32",
            "seed": arguments.seed,
            "return_memory": False,
            "tensorboard": False,
            "export": False,
        },
    }
    file = folder / f"{case.name}.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def prompt_tokens(actor: Path) -> int:
    return len(load_tokenizer(actor, ModelSpec.from_config(actor))(PROMPT)["input_ids"])


def measure_profile(folder: Path, config: Path, arguments: Any) -> Path:
    """profile.json of this machine at both tensor degrees."""
    out = folder / "profile.json"
    program = [ROOT / "tools" / "profile_costs.py", "--config", config, "--out", out, "--tensor", "1,2"]
    program += ["--limit", str(arguments.profile_seconds), "fusion.actor_microbatches=1"]  # large ones, for pipelines
    run([*torchrun(RANKS), *program], more=ALLOCATOR)
    return out


class Comparison:
    """One setting: its tables, their prices, what they take, and what the choice by price loses."""

    def __init__(self, measurement: Measurement, case: Case, config: Path, costs: Mapping[str, Sequence[str]]) -> None:
        """`costs`: arguments of a run by the kind of costs that it is priced by, analytic ones among them."""
        self._measurement, self._case, self._file = measurement, case, config
        self._figures = measurement.part(case.name)
        arguments = measurement.arguments
        longest = sum(load_config(str(config), []).longest_sample)
        self._budgets = [times * longest for times in (BUDGETS[:1] if arguments.quick else BUDGETS)]
        self._rounds, self._jobs = arguments.rounds, 0
        self._lengths = load_lengths(load_config(str(config), []).parallel.lengths).lengths
        self._batches = self._lengths.draw(case.samples, DRAWS, arguments.seed)  # as the planner draws them
        self._prices = {kind: self._priced(more) for kind, more in costs.items()}
        self._tables = list(self._prices[ANALYTIC])
        measurement.say(f"{case.name}: {len(self._tables)} tables")

    def _priced(self, overrides: Sequence[str]) -> dict[Table, Phased]:
        """Every table's price by phase, the fastest first."""
        config = load_config(str(self._file), overrides)
        ranking = Ranking(Setting.of(settle_but_layouts(Job(config, read_specs(config), RANKS)), self._lengths))
        found = {}
        for row, _ in ranking.ranked(
            lambda training, _: (
                training.cut.value in self._budgets and training.recompute == "none" and not training.sequence_parallel
            )
        ):
            found[row.table] = priced_phases(row.price)
        if not found:
            raise InputError(f"{self._file}: no table fits this machine's memory")
        return found

    def run(self, ranks: Ranks) -> None:
        """Measure, compare, keep figures and tables."""
        measured, covering = Measured(), self._covering()
        sides = {table.text: partial(self._job, ranks, table) for table in covering}
        rounds = take_turns(sides, self._rounds)
        for table in covering:
            for metrics in rounds[table.text]:
                measured.add(table, metrics)
        seconds = {table: measured.of(table) for table in self._tables}
        totals = {table: sum(seconds[table].values()) for table in self._tables}
        order = sorted(self._tables, key=totals.__getitem__)
        best = self._figures.value("best", totals[order[0]], "s")
        self._figures.value("tables", len(order))
        self._figures.value("worst_over_best", Figure(totals[order[-1]] / best, "x").at_least(SPREAD_GOAL))
        for kind, prices in self._prices.items():
            self._compare(kind, prices, seconds, totals)
        rows = [[table.text, seconds[table], *(one[table] for one in self._prices.values())] for table in order]
        self._measurement.facts(**{f"{self._case.name}.tables": rows})

    def _covering(self) -> list[Table]:
        """Tables that have every phase of all: each training row with the generation that adds most, then the rest."""
        seen: set[tuple] = set()
        kept: list[Table] = []
        trained: dict[tuple, list[Table]] = {}
        for table in sorted(self._tables, key=lambda one: one.text):
            trained.setdefault(part_of(table, TRAINING), []).append(table)
        alone = [[table] for tables in trained.values() for table in tables]
        for some in (*trained.values(), *alone):
            best = max(some, key=lambda one: len(phases_of(one) - seen))
            if phases_of(best) - seen:
                kept.append(best)
                seen |= phases_of(best)
        return kept

    def _job(self, ranks: Ranks, table: Table, number: int) -> list[tuple[int, dict[str, Any]]]:
        """Train on this round's part of the batches; metrics of all iterations but WARM, each with its batch."""
        self._jobs += 1
        out = self._file.with_suffix(f".{self._jobs}")
        first, last = number * DRAWS // self._rounds, (number + 1) * DRAWS // self._rounds
        which = [*[first] * WARM, *range(first, first + 1 if self._measurement.quick else last)]
        overrides = [*table.overrides(), f"trainer.output_dir={out}", f"trainer.iterations={len(which)}"]
        ranks.ask("run", self._file, overrides, [self._batches[one].output for one in which])
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(out)
        return list(zip(which, rows))[WARM:]

    def _compare(
        self, kind: str, prices: Mapping[Table, Phased], seconds: Mapping[Table, Phased], totals: Mapping[Table, float]
    ) -> None:
        """Prices of one kind of costs beside what was measured."""
        name = f"{self._case.name}.{kind}"
        figure = self._measurement.part(name).value
        predicted = {table: sum(phases.values()) for table, phases in prices.items()}
        chosen = next(iter(prices))
        loss = totals[chosen] / min(totals.values())
        figure("chosen_over_best", Figure(loss, "x").at_most(REGRET_GOALS[kind]))
        errors = [abs(predicted[table] / totals[table] - 1) for table in totals]
        figure("mean_error", Figure(statistics.fmean(errors)).at_most(ERROR_GOAL))
        ranks = float(spearmanr([predicted[table] for table in totals], list(totals.values())).statistic)
        figure("rank_correlation", Figure(ranks).at_least(CORRELATION_GOAL))
        rows = []
        for phase in PHASES:
            parts = {part_of(table, phase): (seconds[table][phase], prices[table][phase]) for table in totals}
            took, price = (sum(column) for column in zip(*parts.values()))
            off = sum(abs(theirs - ours) for ours, theirs in parts.values())
            error = figure(f"{phase.replace(' ', '_')}.error", off / max(took, 1e-9))
            count = len(parts)
            rows.append([phase, str(count), f"{took / count:.3f}", f"{price / count:.3f}", f"{error:.1%}"])
            for part, (ours, theirs) in sorted(parts.items(), key=lambda item: str(item[0])):
                told = f"{name} {phase:20s} {' '.join(map(str, part)):40s}"
                self._measurement.say(f"{told} {ours:.3f} s, priced {theirs:.3f} s")
        head = ("phase", "kinds", "measured s", "predicted s", "differ by, mean")
        self._measurement.table(f"{name}.phases", f"Phases of {self._case.name}, priced by {kind} costs", head, rows)


def phases_of(table: Table) -> set[tuple]:
    """All that its seconds depend on."""
    return {(phase, *part_of(table, phase)) for phase in PHASES}


if __name__ == "__main__":
    run_program(main)
