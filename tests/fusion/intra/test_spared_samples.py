"""Samples without gradient are left out of training, and no bit of a weight or of the optimizer knows of it.

A step that leaves them out is held against one of the same cut that runs them too, behind the others in micro-batches
of their own, and against one that knows nothing of them.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from testkit.training_case import LONGEST, write_model
from testkit.training_pair import add_tensors, make_batch, unit_problem

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.decisions.layouts import given_tasks
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.rules.builders import greedy
from rlhfuse.tasks.microbatch_cut import MicrobatchCut

POOL_RANKS = 2
SAMPLES, EXTRA = 24, 2
LEAVES_OUT, RUNS_ALL, KNOWS_NOTHING = "leaves out", "runs all", "knows nothing"
STEPS = (9, 24, 2, 23, 0)  # samples without gradient in each mini-batch


class RunsAll:
    """A cut with EXTRA micro-batches more a pipeline, last, of the samples that `cut` leaves out."""

    def __init__(self, cut: MicrobatchCut) -> None:
        self.cut, self.rung_of, self.pipelines = cut, cut.rung_of, cut.pipelines
        self.rungs = tuple(sorted({rung + more for rung in cut.rungs for more in (0, EXTRA)}))

    def split(self, lengths: list[int], spared: frozenset[int]) -> list[list[int]]:
        parts, more = self.cut.split(lengths, spared), EXTRA * self.pipelines
        left_out = sorted(spared.difference(*parts))
        return [*parts, *(left_out[at::more] for at in range(more))] if len(left_out) >= more else parts


@dataclass(frozen=True)
class Case:
    """An actor that trains by GRPO without KL; `tokens` of a micro-batch, 0: three a pipeline."""

    layout: str
    tokens: int
    dtype: str
    folder: Path

    @cached_property
    def cut(self) -> MicrobatchCut:
        pipelines = ParallelLayout.parse(self.layout).dp
        if self.tokens:
            return MicrobatchCut.by_tokens(self.tokens, pipelines, SAMPLES, LONGEST, least=2)
        return MicrobatchCut.by_samples(3, pipelines, SAMPLES, LONGEST)

    def config(self, skips: bool) -> RunConfig:
        tasks = ("generation", "inference", "reference_inference", "reward_inference", "critic_inference")
        return RunConfig().with_(
            algorithm={"name": "grpo", "kl_coef": 0, "skip_zero_gradients": skips},
            reference={"path": "none"},
            reward={"function": "rewards:none"},
            actor={"optim": {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}},
            parallel={"actor_train": self.layout, **dict.fromkeys(tasks, "d2t1p1")},
            trainer={"dtype": self.dtype},
        )


def batch_of(step: int) -> RolloutBatch:
    """As many samples as STEPS says are without advantage; the others have one of their own, the same at each token."""
    batch, generator = make_batch(step, SAMPLES), torch.Generator().manual_seed(step)
    advantages = torch.randn(SAMPLES, generator=generator)
    advantages[torch.randperm(SAMPLES, generator=generator)[: STEPS[step]]] = 0.0
    return batch.with_fields(advantages=advantages.repeat_interleave(batch.response_lengths))


def train(rank: int, case: Case, how: str) -> dict:
    """Digests after each step, and what the steps say."""
    from rlhfuse.fusion.intra.training_step import TrainingStep
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.run.rank_models import ModelFolders, build_models

    config = case.config(skips=how != KNOWS_NOTHING)
    layouts = {"actor": ParallelLayout.parse(case.layout)}
    ranks, spec = rank_map(layouts), ModelSpec.from_config(case.folder)
    folders = ModelFolders({"actor": case.folder}, {"actor": spec})
    tasks = given_tasks(config.parallel, config.roles(), ranks.size)
    roles = build_models(config, tasks, folders, ranks, rank, choose_device("cpu", 0, 1))
    cut = RunsAll(case.cut) if how == RUNS_ALL else case.cut
    schedules = {rung: greedy(unit_problem(layouts, rung)) for rung in cut.rungs}
    programs = {rung: lower(schedule, ranks) for rung, schedule in schedules.items()}
    optimizer, made = roles.trained["actor"].optimizer, {"digests": [], "steps": []}
    training = TrainingStep(rank, ranks, cut, schedules, programs, roles.trained, roles.channels, 1.0, lambda _: None)
    for step in range(len(STEPS)):
        result = training.run(batch_of(step), {"actor": 1e-3}, config.algorithm)
        made["steps"].append((result.lengths, len(result.parts_tokens), result.steps["actor"].grad_norm, result.tokens))
        made["digests"].append(digest(optimizer))
    made["weights"] = {
        name: weight.detach().float().numpy().copy()
        for module in optimizer.modules.values()
        for name, weight in module.named_parameters()
    }
    roles.groups.close()
    return made


def digest(optimizer) -> str:
    """Bits of weights, main weights and moments."""
    sha = hashlib.sha256()
    for _, module in sorted(optimizer.modules.items()):
        add_tensors(sha, dict(module.named_parameters()))
    for part in optimizer._parts():
        for number, main in enumerate(one for group in part.optimizer.param_groups for one in group["params"]):
            add_tensors(sha, {f"{number}": main, **part.optimizer.state.get(main, {})})
    return sha.hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "actor", seed=3)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "tokens, dtype",
    [(0, "float32"), (80, "bfloat16"), *(pytest.param(*one, marks=SLOW) for one in ((80, "float32"), (0, "bfloat16")))],
)
@pytest.mark.parametrize("layout", ["d2t1p1", "d1t1p2"])
def test_what_has_no_gradient_may_be_left_out(workers, folder, layout, tokens, dtype):
    case = Case(layout, tokens, dtype, folder)
    fewer, all_run, plain = (workers.run(train, case, how) for how in (LEAVES_OUT, RUNS_ALL, KNOWS_NOTHING))
    assert [one["digests"] for one in fewer] == [one["digests"] for one in all_run]
    for step, zero in enumerate(STEPS):
        (lengths, parts, norm, tokens), (all_lengths, all_parts, *same), others = (
            made[0]["steps"][step] for made in (fewer, all_run, plain)
        )
        assert len(lengths) == max(SAMPLES - zero, parts) and tokens == sum(response for _, response in lengths)
        enough = SAMPLES - len(lengths) >= EXTRA * case.cut.pipelines
        assert len(all_lengths) == SAMPLES if enough else all_lengths == lengths
        assert norm == same[0] and all_parts == parts + enough * EXTRA * case.cut.pipelines
        assert len(others[0]) == SAMPLES and parts <= others[1]
        assert norm == pytest.approx(others[2], rel=1e-2 if dtype == "bfloat16" else 1e-4, abs=1e-12)
    assert fewer[0]["steps"][1][2] == 0.0 and len(set(fewer[0]["digests"])) == len(STEPS), "no gradient is a step, too"
    for made, wanted in zip(fewer, plain):
        for name, weight in made["weights"].items():
            assert weight == pytest.approx(wanted["weights"][name], abs=2e-2 if dtype == "bfloat16" else 1e-4), name
