"""One training of several models as a value: models, layouts, schedule, micro-batches, steps and optimizer."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.algorithm import AlgorithmConfig, PolicyLossConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.ranks import FusedRanks, rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.tasks.microbatch_cut import MicrobatchCut
from testkit.program_cases import random_schedule
from testkit.tiny import write_checkpoint
from testkit.training_pair import BUILDERS, VOCAB, make_batch, unit_problem
from testkit.whole_model import SGD, Recipe

SAMPLES, LONGEST = 24, 36  # tokens of the longest sample there may be


@dataclass(frozen=True)
class Case:
    """What is trained. The first model's pipelines run `microbatches` micro-batches each, the others as many in all;
    with `tokens` as few as have no more of these, by schedules of fewer that are derived from that of the most.

    A model whose name begins with "critic" has a scalar head. Unless pipelines `alternate`, all run in one direction.
    The backwards of the `split` models are split; `seed` is that of a random schedule.
    """

    layouts: Mapping[str, str]
    folders: Mapping[str, Path]
    schedule: str = "fused"
    microbatches: int = 4
    steps: int = 3
    recipe: Recipe = SGD
    samples: int = SAMPLES
    sequence_parallel: bool = False
    recompute: str = "none"
    reduce: str = "early"
    alternate: bool = True
    split: tuple[str, ...] = ()
    seed: int = 0
    tokens: int = 0

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @cached_property
    def parsed(self) -> dict[str, ParallelLayout]:
        return {model: ParallelLayout.parse(text) for model, text in self.layouts.items()}

    @cached_property
    def ranks(self) -> FusedRanks:
        return rank_map(self.parsed, self.alternate)

    @cached_property
    def cut(self) -> MicrobatchCut:
        first, last = self.ranks.shape.shares[0], self.ranks.shape.shares[-1]
        if not self.tokens:
            return MicrobatchCut(first.layout.dp, (self.microbatches,), math.inf)
        multiple = last.pipelines // math.gcd(first.pipelines, last.pipelines)
        return MicrobatchCut.by_tokens(self.tokens, first.layout.dp, self.samples, LONGEST, multiple)

    @cached_property
    def problem(self) -> FusionProblem:
        return unit_problem(self.parsed, self.cut.rungs[-1], self.split, self.alternate)

    @cached_property
    def planned(self) -> Schedule:
        """With the most micro-batches."""
        if self.schedule == "random":
            return random_schedule(self.problem, random.Random(self.seed))
        return BUILDERS[self.schedule](self.problem)

    @cached_property
    def family(self) -> dict[int, Schedule]:
        """By micro-batches of a pipeline of the first model."""
        return {rung: self.planned.of_fewer(self.problem.with_microbatches(rung)) for rung in self.cut.rungs}

    @property
    def tied(self) -> frozenset[str]:
        specs = {model: ModelSpec.from_config(folder) for model, folder in self.folders.items()}
        return frozenset(m for m, spec in specs.items() if spec.tied_embeddings and not scalar_head(m))

    def batch(self, step: int) -> RolloutBatch:
        """The mini-batch of a step."""
        batch = make_batch(step, self.samples)
        return batch.counting(torch.arange(self.samples) % 3 > 0) if self.recipe.by_sample else batch

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The settings of its losses."""
        gspo = AlgorithmConfig(policy_loss=PolicyLossConfig(loss_mode="gspo"), loss_agg_mode="seq-mean-token-mean")
        return gspo if self.recipe.by_sample else AlgorithmConfig()

    def parts(self, step: int) -> list[list[int]]:
        """Samples of every micro-batch of a mini-batch: those of all pipelines in a row, the same for all models."""
        return self.cut.split(self.batch(step).lengths.tolist())

    @property
    def rungs(self) -> list[int]:
        """Micro-batches of each mini-batch that is trained on."""
        return [self.cut.rung_of(self.parts(step)) for step in range(self.steps)]


def scalar_head(model: str) -> bool:
    return model.startswith("critic")


def write_model(folder: Path, *, scalar_head: bool = False, seed: int, **shape: Any) -> Path:
    """A random model whose matrices are small, as a trained model's are.

    In one process float32 gradients of such a model are 4e-7 to 8e-7 of each tensor's largest from float64's; with
    matrices of norm 1 the same arithmetic is 3e-6 away, because the residual stream amplifies every rounding.
    """
    write_checkpoint(folder, scalar_head=scalar_head, seed=seed, vocab_size=VOCAB, **shape)
    file, tied = folder / "model.safetensors", shape.get("tie_word_embeddings")
    tensors = {
        name: tensor * (0.3 if tensor.ndim > 1 and "embed" not in name or tied and name == "model.norm.weight" else 1.0)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def predicted_peaks(case: Case) -> list[int]:
    """Micro-batches of all models kept at once on every rank, by the schedule (an activation counts as 1)."""
    nodes = [max(peaks) for peaks in zip(*(evaluate(case.family[rung]).node_peak_memory for rung in case.rungs))]
    return [int(nodes[case.ranks.node_of(rank)]) for rank in range(case.ranks.size)]


def write_models(base: Path) -> dict[str, Path]:
    """The models of these tests. "five" has five layers, "tied" and "qwen3" also one weight for embedding and
    output, and "qwen3" norms of queries and keys."""
    return {
        "actor": write_model(base / "actor", seed=3),
        "critic": write_model(base / "critic", scalar_head=True, seed=13),
        "second": write_model(base / "second", seed=4),
        "tied": write_model(base / "tied", seed=8, num_hidden_layers=5, tie_word_embeddings=True),
        "qwen3": write_model(base / "qwen3", seed=9, model_type="qwen3", num_hidden_layers=5, tie_word_embeddings=True),
        "five": write_model(base / "five", scalar_head=True, seed=8, num_hidden_layers=5),
    }
