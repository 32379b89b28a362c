"""One mini-batch through all models that train: the cut, the program, one optimizer step each (paper section 5).

The mini-batch is cut into K x M micro-batches once, the same for every model, computed identically on every rank;
the pipelines of a model take them in turn, and cut them as they run. Losses are sums divided by what the mini-batch
counts, in samples that are left out too: numbers known to every rank beforehand, so that data-parallel reduction is a
sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.base.clock import Clock
from rlhfuse.base.errors import InputError, NotFiniteError
from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.fusion.intra.dry_run import dry_run
from rlhfuse.fusion.intra.executor import PipelineParts, PipelineWork, ProgramExecutor
from rlhfuse.fusion.intra.microbatches import Microbatch, Microbatches
from rlhfuse.fusion.intra.p2p import Channels
from rlhfuse.fusion.intra.step_report import StepReport
from rlhfuse.models.heads import LanguageOutput
from rlhfuse.models.stage import LossFunction, Outbox, TrainingStage
from rlhfuse.parallel.collectives import all_gather_objects
from rlhfuse.parallel.groups import ModelGrid
from rlhfuse.parallel.optimizer import ModelOptimizer, StepResult
from rlhfuse.ppo.advantage import spared_samples
from rlhfuse.ppo.losses import (
    LossTerms,
    Stats,
    add_stats,
    highest_entropies,
    kl_loss,
    per_token,
    policy_loss,
    value_loss,
)
from rlhfuse.ppo.rollout import RolloutBatch, given
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.ranks import FusedRanks
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.program import Programs
from rlhfuse.tasks.balance import deal
from rlhfuse.tasks.microbatch_cut import MicrobatchCut
from rlhfuse.tasks.role import Role

AddLoss = Callable[[dict[str, Tensor], Stats, slice], Tensor]  # (losses by term, statistics, which tokens) -> their sum


@dataclass(frozen=True)
class TrainedModel:
    """One model that trains on this rank, by the loss of its role."""

    role: Role  # its name in programs
    spec: ModelSpec  # of its vocabulary the ids that take part
    grid: ModelGrid
    stages: Mapping[int, TrainingStage]  # by real pipeline stage
    optimizer: ModelOptimizer
    tp_group: dist.ProcessGroup
    dtype: torch.dtype


@dataclass(frozen=True)
class MinibatchResult:
    """What one mini-batch did on this rank. Statistics are this rank's sums, on last stages only."""

    stats: Mapping[str, Stats]  # role -> sums
    tokens: int  # response tokens that count, of the samples that were computed
    lengths: tuple[tuple[int, int], ...]  # tokens of prompt and response of each of these, in the mini-batch's order
    parts_tokens: tuple[int, ...]  # of every micro-batch
    steps: Mapping[str, StepResult]  # role -> its optimizer step
    report: StepReport


class TrainingStep:
    """Trains `models` on this rank by the program of each mini-batch's number of micro-batches (M1).

    Raises InputError for a model or stage that is not here.
    """

    def __init__(
        self,
        rank: int,
        ranks: FusedRanks,
        cut: MicrobatchCut,
        schedules: Mapping[int, Schedule],
        programs: Mapping[int, Programs],
        models: Mapping[str, TrainedModel],
        channels: Channels,
        temperature: float,
        progress: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        """`clock`: the rank's, which records every action."""
        needed = [share.model for share in ranks.shape.shares]
        if missing := [name for name in needed if name not in models]:
            raise InputError(f"the program trains {', '.join(needed)}, but {', '.join(missing)} is not built; build it")
        self._rank, self._cut, self._clock = rank, cut, clock or Clock(rank)
        self._problem = schedules[cut.rungs[0]].problem
        self._models = models
        self._temperature = temperature
        self._device = channels.device
        self._roles = {ranks.pipeline_of(role, rank): role for role in needed}
        parts = {
            pipeline: PipelineParts(role, models[role].stages, models[role].optimizer, models[role].dtype)
            for pipeline, role in self._roles.items()
        }
        self._executors = {
            rung: ProgramExecutor(programs[rung][rank], parts, channels, progress, self._clock) for rung in cut.rungs
        }
        self._progress = progress
        self._outboxes = {pipeline: Outbox() for pipeline in parts}
        self.dry_run_first = self._device.type == "cuda"  # nothing on a CPU is made at first use that others wait for

    def run(self, batch: RolloutBatch, lr: Mapping[str, float | None], algorithm: AlgorithmConfig) -> MinibatchResult:
        """Train on one mini-batch in host memory; `lr` is by role.

        A model whose `lr` is None is held still: it computes, and its step is left out.

        `algorithm`: the settings of the losses, with the weight of a KL that is in force. Raises
        FloatingPointError, the same on all ranks, when a loss or gradient is not finite: the model named did not step.
        """
        if algorithm.top_entropy_quantile < 1:
            batch = batch.with_fields(high_entropy=highest_entropies(batch, algorithm.top_entropy_quantile))
        lengths = batch.lengths.tolist()
        parts = self._cut.split(lengths, spared_samples(batch, algorithm))
        executor = self._executors[self._cut.rung_of(parts)]
        tokens = tuple(sum(lengths[i] for i in part) for part in parts)
        losses = Losses(batch, algorithm, self._temperature)
        work = {}
        for name, role in self._roles.items():
            model = self._models[role]
            pipeline, _, tp_rank = model.grid.position(self._rank)
            own = deal(parts, model.grid.layout.dp, pipeline)
            shards = next(iter(model.stages.values())).stage.shards
            cuts = Microbatches(batch, own, self._device, shards, self._outboxes[name])
            loss = losses.of(model, cuts, counts=tp_rank == 0)
            work[name] = PipelineWork(cuts.rows, cuts.packed, loss, lr[role])
        for model in self._models.values():
            model.optimizer.zero_grad()
        if self.dry_run_first:
            self._progress("training: a dry run of every stage")
            dry_run([(executor.pipelines[name], work[name]) for name in work], self._device)
            losses.stats.clear()
            self.dry_run_first = False
        report = executor.run(work)
        self._clock.spans += report.spans
        if not report.finite:
            self._raise_fault(report)
        steps = {role: report.steps[name] for name, role in self._roles.items()}
        prompts, responses = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
        computed = sorted(chain(*parts))
        counted = int(batch.counted_lengths[computed].sum())
        computed = tuple((prompts[sample], responses[sample]) for sample in computed)
        return MinibatchResult(losses.stats, counted, computed, tokens, steps, report)

    def _raise_fault(self, report: StepReport) -> None:
        """Gather what each rank saw, and raise the same NotFiniteError everywhere; a collective."""
        stepped = [self._roles[name] for name, result in report.steps.items() if result.finite]
        end = f"stepped before it was seen: {', '.join(stepped)}" if stepped else "no model stepped"
        own = [(self._rank, str(action)) for action in report.faults]
        faults = [fault for part in all_gather_objects(own) for fault in part]
        if not faults:
            stopped = next(self._roles[name] for name, result in report.steps.items() if not result.finite)
            raise NotFiniteError(
                f"the gradient norm of {stopped} is not finite, though every loss and gradient between its stages is; "
                f"{end}"
            )
        rank, text = min(faults, key=lambda fault: _origin_first(Action.parse(fault[1])))
        action = Action.parse(text)
        what = "gradient" if action.kind is Kind.B else "loss or hidden state"
        raise NotFiniteError(
            f"{self._problem.pipeline(action.pipeline).model}, stage {action.stage}, micro-batch {action.microbatch}: "
            f"the {what} that {action} gave out on rank {rank} is not finite "
            f"({len(faults)} such results on all ranks); {end}"
        )


class Losses:
    """The loss functions of one mini-batch, and the sums that they leave in `stats`."""

    def __init__(self, minibatch: RolloutBatch, algorithm: AlgorithmConfig, temperature: float) -> None:
        self._terms = LossTerms.of(algorithm, minibatch)
        self._algorithm = algorithm
        self._temperature = temperature
        self.stats: dict[str, Stats] = {}

    def of(self, model: TrainedModel, cuts: Microbatches, counts: bool) -> LossFunction:
        """The loss of a model's last stage, by micro-batch; `counts`: this tensor rank's statistics are kept."""

        def loss(output: Any, microbatch: int) -> Tensor:
            compute = {"policy": self._policy_loss, "value": self._value_loss}[model.role.loss]
            lengths, tokens = cuts[microbatch].lengths, len(cuts[microbatch].targets)
            sizes = per_token(lengths.float(), lengths, tokens)

            def add(losses: dict[str, Tensor], sums: Stats, rows: slice) -> Tensor:
                if counts:
                    self.stats[model.role] = add_stats(self.stats.get(model.role, {}), sums)
                return self._terms.total(losses, sizes[rows])

            return compute(model, cuts[microbatch], output, add)

        return loss

    def _policy_loss(self, model: TrainedModel, microbatch: Microbatch, output: LanguageOutput, add: AddLoss) -> Tensor:
        algorithm, samples, terms = self._algorithm, microbatch.samples, self._terms.terms
        assert samples.advantages is not None, "advantages come before training"

        def loss(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
            looked_up = samples.old_logprobs[rows], given(samples.advantages)[rows]
            policy, sums = policy_loss(logprobs, *looked_up, microbatch.lengths, algorithm)
            if samples.high_entropy is not None:
                policy = policy.where(samples.high_entropy[rows], 0.0)
            losses = {"policy": policy}
            if terms["kl"].coefficient:
                losses["kl"], kl_sums = kl_loss(logprobs, given(samples.ref_logprobs)[rows], algorithm.estimator)
                sums |= kl_sums
            sums["entropy"] = entropy.detach().double().sum()
            if terms["entropy"].coefficient:
                losses["entropy"] = entropy
            return add(losses, sums, rows)

        return output.loss(
            loss,
            microbatch.predictions,
            microbatch.targets,
            model.spec.vocab,
            self._temperature,
            entropy_graph=terms["entropy"].coefficient != 0,
            by_token=algorithm.policy_loss.by_token,
        )

    def _value_loss(self, model: TrainedModel, microbatch: Microbatch, values_T: Tensor, add: AddLoss) -> Tensor:
        values, samples = values_T[microbatch.predictions], microbatch.samples
        assert samples.values is not None and samples.returns is not None, "returns come before training"
        losses, sums = value_loss(values, samples.values, samples.returns, self._algorithm.value_clip_eps)
        return add({"value": losses}, sums, slice(None))


def _origin_first(action: Action) -> tuple:
    """Sorts faults so that the first is where it began: forwards before backwards, each in the direction of data."""
    backward = action.kind is Kind.B
    return backward, action.microbatch, -action.stage if backward else action.stage, action.pipeline
