"""One mini-batch through all models that train: the cut, the program, one optimizer step each.

The mini-batch is cut into K x M micro-batches once, the same for every model, computed identically on every
rank; pipeline k of a model takes parts k*M to (k+1)*M. Losses are sums divided by the mini-batch's response
tokens, a number known to every rank beforehand, so that data-parallel reduction is a sum.

A mini-batch in which any rank sees a loss or gradient that is not finite changes no weights anywhere: every rank
raises FloatingPointError that names the same model, stage and micro-batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.config.settings import AlgorithmConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.errors import InputError
from rlhfuse.fusion.intra.executor import PipelineParts, PipelineWork, ProgramExecutor
from rlhfuse.fusion.intra.p2p import Channels
from rlhfuse.fusion.intra.report import ActionSpan, StepReport
from rlhfuse.models.heads import token_logprobs
from rlhfuse.models.stage import LossFunction, PackedTokens, TrainingStage
from rlhfuse.parallel.collectives import all_gather_bytes
from rlhfuse.parallel.groups import ModelGrid
from rlhfuse.parallel.optimizer import ModelOptimizer, StepResult
from rlhfuse.ppo.balance import cut_microbatches
from rlhfuse.ppo.losses import Stats, add_stats, kl_loss_sum, policy_loss_sum, value_loss_sum
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.ranks import FusedRanks
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.program import Programs


@dataclass(frozen=True)
class TrainedModel:
    """One model that trains on this rank: with a scalar head on values, else on log-probabilities."""

    role: str  # its name in programs: actor, critic, ...
    spec: ModelSpec
    grid: ModelGrid
    scalar_head: bool
    stages: Mapping[int, TrainingStage]  # by real pipeline stage
    optimizer: ModelOptimizer
    tp_group: dist.ProcessGroup
    dtype: torch.dtype

    @property
    def tied(self) -> bool:
        """Whether embedding and output layer are one weight."""
        return self.spec.tied_embeddings and not self.scalar_head


@dataclass(frozen=True)
class MinibatchResult:
    """What one mini-batch did on this rank. Statistics are this rank's sums, on last stages only."""

    stats: Mapping[str, Stats]  # role -> sums
    tokens: int  # response tokens of the whole mini-batch
    sample_tokens: tuple[int, ...]  # of every sample, prompt included, in the mini-batch's order
    parts_tokens: tuple[int, ...]  # of every micro-batch
    steps: Mapping[str, StepResult]  # role -> its optimizer step
    report: StepReport

    @property
    def spans(self) -> tuple[ActionSpan, ...]:
        return self.report.spans

    @property
    def program_seconds(self) -> float:
        return self.report.seconds


class TrainingStep:
    """Trains `models` on this rank by its program.

    Raises ScheduleError unless the programs were lowered from `schedule` for `ranks`, InputError when a model or a
    stage that they need is not here.
    """

    def __init__(
        self,
        rank: int,
        ranks: FusedRanks,
        schedule: Schedule,
        programs: Programs,
        models: Mapping[str, TrainedModel],
        channels: Channels,
        algorithm: AlgorithmConfig,
        temperature: float,
        device: torch.device,
        progress: Callable[[str], None],
    ) -> None:
        needed = [share.model for share in ranks.shape.shares]
        if missing := [name for name in needed if name not in models]:
            raise InputError(f"the program trains {', '.join(needed)}, but {', '.join(missing)} is not built; build it")
        programs.refuse_unless_for(schedule, ranks)
        self._rank = rank
        self._programs = programs
        self._models = models
        self._algorithm = algorithm
        self._temperature = temperature
        self._device = device
        self._pipelines = {role: ranks.pipeline_of(role, rank) for role in needed}
        parts = {
            self._pipelines[role]: PipelineParts(model.stages, model.optimizer, model.dtype)
            for role, model in models.items()
        }
        self._executor = ProgramExecutor(programs[rank], parts, channels, progress)

    def run(
        self,
        batch: RolloutBatch,
        microbatches: Mapping[str, int],
        lr: Mapping[str, float],
        kl_coef: float | None = None,
    ) -> MinibatchResult:
        """Train on one mini-batch; `microbatches` per pipeline and `lr` are by role.

        `kl_coef` is the weight of a KL in the loss that is in force; None: the algorithm's own.

        Raises InputError before anything is sent when a micro-batch is larger than its buffer, FloatingPointError
        when a loss or gradient is not finite; all weights and optimizer states are as before then, on every rank.
        """
        self._kl_coef = self._algorithm.kl_coef if kl_coef is None else kl_coef
        lengths = batch.lengths.tolist()
        some = next(iter(self._models))
        parts = cut_microbatches(lengths, self._models[some].grid.dp * microbatches[some])
        tokens = tuple(sum(lengths[i] for i in part) for part in parts)
        stats: dict[str, Stats] = {}
        for role in self._models:
            self._programs.refuse_tokens(role, tokens)
        work = {
            self._pipelines[role]: self._work(model, batch, parts, microbatches[role], lr[role], stats)
            for role, model in self._models.items()
        }
        for model in self._models.values():
            model.optimizer.zero_grad()
        report = self._executor.run(work)
        if not report.finite:
            self._executor.undo()
            self._raise_fault(report)
        steps = {role: report.steps[pipeline] for role, pipeline in self._pipelines.items()}
        return MinibatchResult(stats, batch.response_tokens, tuple(lengths), tokens, steps, report)

    def _raise_fault(self, report: StepReport) -> None:
        """Tell every rank what each saw, and raise the same FloatingPointError everywhere; a collective."""
        stopped = next(name for name, result in report.steps.items() if not result.finite).partition(".")[0]
        mine = [[self._rank, str(action)] for action in report.faults]
        seen = [tuple(fault) for data in all_gather_bytes(json.dumps(mine).encode()) for fault in json.loads(data)]
        if not seen:
            raise FloatingPointError(
                f"the gradient norm of {stopped} is not finite, though every loss and gradient between its stages is; "
                "no weights were changed"
            )
        rank, text = min(seen, key=lambda fault: _age(Action.parse(fault[1])))
        action = Action.parse(text)
        model = action.pipeline.partition(".")[0]
        what = "gradient" if action.kind is Kind.B else "loss or hidden state"
        raise FloatingPointError(
            f"{model}, stage {action.stage}, micro-batch {action.microbatch}: the {what} that {action} gave out on "
            f"rank {rank} is not finite ({len(seen)} such results on all ranks); no weights were changed"
        )

    def _work(
        self,
        model: TrainedModel,
        batch: RolloutBatch,
        parts: list[list[int]],
        count: int,
        lr: float,
        stats: dict[str, Stats],
    ) -> PipelineWork:
        pipeline, _, tp_rank = model.grid.position(self._rank)
        shards = next(iter(model.stages.values())).stage.shards
        cuts = [batch.select(part).to(self._device) for part in parts[pipeline * count : (pipeline + 1) * count]]
        packed = []
        for cut in cuts:
            tokens, borders = cut.tokens.tolist(), cut.cu_seqlens.tolist()
            rows = [tokens[a:b] for a, b in zip(borders, borders[1:])]
            packed.append(PackedTokens.pack(rows, self._device, shards))
        make_loss = self._value_loss if model.scalar_head else self._policy_loss
        loss = make_loss(model, cuts, batch.response_tokens, stats, counts=tp_rank == 0)
        return PipelineWork(tuple(packed), loss, lr)

    def _policy_loss(
        self, model: TrainedModel, cuts: list[RolloutBatch], tokens: int, stats: dict[str, Stats], counts: bool
    ) -> LossFunction:
        algorithm, kl_coef = self._algorithm, self._kl_coef

        def loss(logits_TV: Tensor, microbatch: int) -> Tensor:
            cut = cuts[microbatch]
            logprobs, entropy = token_logprobs(
                logits_TV[cut.prediction_index],
                cut.tokens[cut.response_index],
                model.spec.vocab,
                self._temperature,
                model.tp_group,
            )
            total, sums = policy_loss_sum(
                logprobs,
                cut.old_logprobs,
                cut.advantages,
                algorithm.clip_eps,
                algorithm.clip_eps_high,
                algorithm.dual_clip,
            )
            if algorithm.kl_in == "loss" and kl_coef:
                penalty, kl_sums = kl_loss_sum(logprobs, cut.ref_logprobs, algorithm.kl_estimator)
                total, sums = total + kl_coef * penalty, sums | kl_sums
            if counts:
                sums["entropy"] = entropy.detach().double().sum()
                stats[model.role] = add_stats(stats.get(model.role, {}), sums)
            if algorithm.entropy_coef:
                total = total - algorithm.entropy_coef * entropy.sum()
            return total / tokens

        return loss

    def _value_loss(
        self, model: TrainedModel, cuts: list[RolloutBatch], tokens: int, stats: dict[str, Stats], counts: bool
    ) -> LossFunction:
        algorithm = self._algorithm

        def loss(values_T: Tensor, microbatch: int) -> Tensor:
            cut = cuts[microbatch]
            values = values_T[cut.prediction_index]
            total, sums = value_loss_sum(values, cut.values, cut.returns, algorithm.value_clip_eps)
            if counts:
                stats[model.role] = add_stats(stats.get(model.role, {}), sums)
            return algorithm.value_loss_coef * total / tokens

        return loss


def _age(action: Action) -> tuple:
    """Sorts faults so that the first is where it began: forwards before backwards, each in the direction of data."""
    backward = action.kind is Kind.B
    return backward, action.microbatch, -action.stage if backward else action.stage, action.pipeline
