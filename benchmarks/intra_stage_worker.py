"""One rank of the intra-stage benchmark: the models' stages on it, and every way of training them.

rank_processes.py starts it and calls `TrainingRank`'s methods over a pipe. All sides of a case train the same stages
on the same micro-batches. The weights do not change, so that every run of a case must leave the same bits in the
gradient buffers: `digest` is how the benchmark checks it.

Times are of CLOCK_MONOTONIC (`time.perf_counter`), which all processes of one machine share.
"""

from __future__ import annotations

import gc
import hashlib
import resource
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated", module="torch.distributed")

import torch
import torch.distributed as dist
from intra_stage_cases import MEGATRON, MODELS, RANKS, Case, Sizes, rank_layout
from intra_stage_ranks import Action, Run, Spent
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_1f1b import megatron_1f1b
from rank_processes import TIMEOUT_SECONDS
from torch import Tensor

from rlhfuse.config.settings import AlgorithmConfig, OptimizerConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.fusion.intra.executor import PipelineParts, PipelineWork, ProgramExecutor
from rlhfuse.fusion.intra.p2p import Channels
from rlhfuse.fusion.intra.step_report import StepReport
from rlhfuse.models.build import build_model
from rlhfuse.models.heads import token_logprobs
from rlhfuse.models.stage import LossFunction, PackedTokens, PipelineStage, TrainingStage
from rlhfuse.parallel.device import choose_device
from rlhfuse.parallel.groups import GroupMaker, ModelGrid
from rlhfuse.parallel.optimizer import ModelOptimizer
from rlhfuse.ppo.losses import policy_loss_sum, value_loss_sum
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.run.roles import neighbour_pairs
from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.program.program import Program

Phase = Callable[[], "StepReport | None"]
WARM_CYCLES = 2  # of the profile, not counted
ECHOES = 30  # of the transfer measurement


@dataclass(frozen=True)
class Part:
    """One model on this rank."""

    spec: ModelSpec
    grid: ModelGrid
    stage: TrainingStage
    optimizer: ModelOptimizer
    groups: ProcessGroupCollection

    def number(self, rank: int) -> int:
        """Its stage."""
        return self.grid.position(rank)[1]


class TrainingRank:
    """The models of one size on this rank."""

    def __init__(self, rank: int, sizes: Sizes, seed: int) -> None:
        self.rank = rank
        self.sizes = sizes
        self.seed = seed
        self.device = choose_device("cpu", 0, 1)
        self.maker = GroupMaker(TIMEOUT_SECONDS)
        self.parts = {model: self._part(model) for model in MODELS}
        pairs = [pair for part in self.parts.values() for pair in neighbour_pairs(part.grid)]
        self.channels = Channels(rank, self.maker.channels("pipeline", pairs), self.device.torch_device)
        self.channels.connect()

    def _part(self, model: str) -> Part:
        spec, head = self.sizes.spec(model), model == "critic"
        grid = ModelGrid(rank_layout().pipelines(model))
        groups = self.maker.for_model(model, grid, self.rank)
        built = build_model(spec, grid, groups, self.rank, scalar_head=head, dtype=torch.float32, device=self.device)
        stage = grid.position(self.rank)[1]
        draw_weights(built, self.seed + 100 * MODELS.index(model) + stage)
        optimizer = ModelOptimizer({stage: built}, OptimizerConfig(), groups, self.device)
        ends = PipelineStage(optimizer.module, first=stage == 0, last=stage == grid.pp - 1, scalar_head=head)
        return Part(spec, grid, TrainingStage(ends), optimizer, groups)

    def load(self, case: Case, programs: Mapping[str, tuple[tuple[str, ...], ...]]) -> None:
        """Take a case: `programs[side][phase][rank]` is the text of what a rank runs, phases parted by a barrier."""
        cuts = draw_batch(case, self.seed)
        packed = tuple(pack(cut) for cut in cuts)
        tokens = sum(cut.response_tokens for cut in cuts)
        losses = {"actor": actor_loss(self.parts["actor"], cuts, tokens), "critic": critic_loss(cuts, tokens)}
        self.work = {
            # at a learning rate of 0 an optimizer step costs the same and leaves the weights for the next side
            model: PipelineWork(packed, losses[model], lr=0.0)
            for model in MODELS
        }
        self.sides = {
            side: [self._phase(Program.parse(texts[self.rank])) for texts in phases]
            for side, phases in programs.items()
        }
        self.sides[MEGATRON] = [self._megatron(model) for model in MODELS]

    def _phase(self, program: Program) -> Phase:
        parts = {
            model: PipelineParts({part.number(self.rank): part.stage}, part.optimizer, torch.float32)
            for model, part in self.parts.items()
        }
        executor = ProgramExecutor(program, parts, self.channels, lambda _: None)
        return lambda: executor.run(self.work)

    def _megatron(self, model: str) -> Phase:
        part, work = self.parts[model], self.work[model]

        def phase() -> None:
            megatron_1f1b(part.stage.stage, work.batches, work.loss, part.groups, self.device)

        return phase

    def run(self, side: str) -> Run:
        """Train one mini-batch as `side` does, from a barrier on."""
        for part in self.parts.values():
            part.optimizer.zero_grad()
        gc.collect()
        gc.disable()
        reports: list[StepReport] = []
        try:
            barrier()
            faults = page_faults()
            start, cpu = time.perf_counter(), time.thread_time()
            for number, phase in enumerate(self.sides[side]):
                if number:
                    barrier()
                if report := phase():
                    reports.append(report)
            end, cpu = time.perf_counter(), time.thread_time() - cpu
            faults = page_faults() - faults
        finally:
            gc.enable()
        return run_of(self.rank, start, end, cpu, faults, reports)

    def digest(self) -> str:
        """Of all gradients on this rank."""
        sha = hashlib.sha256()
        for part in self.parts.values():
            for parameter in part.optimizer.module.parameters():
                sha.update(parameter.main_grad.clone().numpy().tobytes())  # numpy pins the memory it looks at
        return sha.hexdigest()

    def profile(self, cycles: int) -> dict[tuple[str, int, str], list[float]]:
        """Seconds of each action of this rank's stages, measured without waits while the other rank does the same.

        A cycle is two micro-batches of each model, forwards first and backwards in reverse, as in a fused step.
        """
        work = [(model, mb) for model in MODELS for mb in (0, 1)]
        found: dict[tuple[str, int, str], list[float]] = {}
        generator = torch.Generator().manual_seed(self.seed)
        shape = (len(self.work["actor"].batches[0]), 1, self.sizes.hidden)
        for cycle in range(WARM_CYCLES + cycles):
            barrier()
            for kind in (Kind.F, Kind.B):
                for model, mb in work if kind is Kind.F else (work[2:] + work[:2]):
                    seconds = self._timed(model, mb, kind, torch.randn(shape, generator=generator))
                    if cycle >= WARM_CYCLES:
                        found.setdefault((model, self.parts[model].number(self.rank), str(kind)), []).append(seconds)
        return found

    def _timed(self, model: str, mb: int, kind: Kind, tensor: Tensor) -> float:
        stage, work = self.parts[model].stage, self.work[model]
        start = time.perf_counter()
        if kind is Kind.F:
            stage.forward(mb, work.batches[mb], None if stage.stage.first else tensor, work.loss)
        else:
            stage.backward(mb, None if stage.stage.last else tensor / tensor.numel())
        return time.perf_counter() - start

    def transfer(self) -> dict[str, float]:
        """Seconds of one hidden state from rank to rank (half an echo), and of the two calls that start it."""
        shape = (self.sizes.microbatch_tokens, 1, self.sizes.hidden)
        other, tensor = 1 - self.rank, torch.zeros(shape)
        times: dict[str, list[float]] = {"one_way": [], "send_call": [], "receive_call": []}
        for _ in range(ECHOES):
            begin = time.perf_counter()
            work, buffer = self.channels.post_receive(shape, torch.float32, other)
            times["receive_call"].append(time.perf_counter() - begin)
            barrier()
            start = time.perf_counter()
            if self.rank:
                work.wait()
            begin = time.perf_counter()
            self.channels.send(tensor, other)
            times["send_call"].append(time.perf_counter() - begin)
            if not self.rank:
                work.wait()
            times["one_way"].append((time.perf_counter() - start) / 2)
            self.channels.drain()
        return {name: sorted(values)[len(values) // 2] for name, values in times.items()}

    def close(self) -> None:
        self.maker.close()


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def run_of(rank: int, start: float, end: float, cpu_seconds: float, faults: int, reports: list[StepReport]) -> Run:
    """In words that need no torch to be read."""
    actions = tuple(
        Action(
            rank,
            str(span.action),
            (span.action.pipeline, span.action.stage, str(span.action.kind)),
            span.start_seconds,
            span.end_seconds,
        )
        for report in reports
        for span in report.spans
    )
    spent = tuple(
        (str(kind), Spent(times.count, times.transport_seconds, times.waiting_seconds, times.overhead_seconds))
        for report in reports
        for kind, times in report.times.items()
    )
    drain = sum(report.drain_seconds for report in reports)
    live = max((report.peak_live for report in reports), default=0)
    return Run(start, end, cpu_seconds, faults, actions, spent, drain, live)


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Random weights as a fresh Llama has them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def draw_batch(case: Case, seed: int) -> list[RolloutBatch]:
    """The case's micro-batches, random, all of one shape."""
    sizes, generator = case.sizes, torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, sizes.vocab, (count,), generator=generator).tolist())

    rollouts = []
    for i in range(case.microbatches * sizes.sequences):
        prompt, response = draw(sizes.prompt_tokens), draw(sizes.response_tokens)
        noise = 0.1 * torch.randn(3, sizes.response_tokens, generator=generator)
        rollouts.append(Rollout(i, prompt, response, noise[0] - 6, "stop", noise[1] - 6, noise[2], 0.5))
    batch = RolloutBatch.from_rollouts(rollouts)
    count = batch.response_tokens
    batch = batch.with_fields(
        advantages=torch.randn(count, generator=generator), returns=torch.randn(count, generator=generator)
    )
    rows = range(len(rollouts))
    return [batch.select(list(rows[i : i + sizes.sequences])) for i in rows[:: sizes.sequences]]


def pack(cut: RolloutBatch) -> PackedTokens:
    tokens, borders = cut.tokens.tolist(), cut.cu_seqlens.tolist()
    return PackedTokens.pack([tokens[a:b] for a, b in zip(borders, borders[1:])], torch.device("cpu"))


def actor_loss(part: Part, cuts: list[RolloutBatch], tokens: int) -> LossFunction:
    def loss(logits_TV: Tensor, microbatch: int) -> Tensor:
        cut = cuts[microbatch]
        logprobs, _ = token_logprobs(
            logits_TV[cut.prediction_index], cut.tokens[cut.response_index], part.spec.vocab, 1.0, part.groups.tp
        )
        return policy_loss_sum(logprobs, cut.old_logprobs, cut.advantages, AlgorithmConfig().clip_eps)[0] / tokens

    return loss


def critic_loss(cuts: list[RolloutBatch], tokens: int) -> LossFunction:
    def loss(values_T: Tensor, microbatch: int) -> Tensor:
        cut = cuts[microbatch]
        values = values_T[cut.prediction_index]
        return value_loss_sum(values, cut.values, cut.returns, AlgorithmConfig().value_clip_eps)[0] / tokens

    return loss


def barrier() -> None:
    dist.all_reduce(torch.zeros(1))


def begin(rank: int) -> None:
    """Join the other ranks, with one thread each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
