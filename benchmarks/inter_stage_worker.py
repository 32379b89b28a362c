"""One rank of the inter-stage benchmark: a generation instance and an inference worker, as the trainer builds them.

rank_processes.py starts it and calls `FusionRank`'s methods over a pipe. All runs generate and score the same samples,
so every run must leave the same bits: `RankRun.digest` is how the benchmark checks it.
"""

from __future__ import annotations

import gc
import hashlib
import time
import warnings
from collections.abc import Sequence
from typing import Any

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated", module="torch.distributed")

import torch
import torch.distributed as dist
from inter_stage_cases import BLOCK_TOKENS, INSTANCES, ROLES, SCORERS, Sizes
from inter_stage_runs import RankRun
from intra_stage_worker import draw_weights
from rank_processes import TIMEOUT_SECONDS

from rlhfuse.config.spec import ParallelLayout
from rlhfuse.decisions.migration import MoveCost
from rlhfuse.decisions.placement import Placement
from rlhfuse.fusion.inter.generation import Request
from rlhfuse.fusion.inter.inference import FrozenModel, Scorer
from rlhfuse.fusion.inter.inter_stage import InterStage
from rlhfuse.fusion.inter.migration import FusionLimits
from rlhfuse.fusion.inter.report import GenInferReport
from rlhfuse.gen.core.sequence import SamplingParams
from rlhfuse.gen.engine import Engine, EngineOptions
from rlhfuse.gen.migration.peer_transfer import HeadPlan, receive_sequences, send_sequences
from rlhfuse.models.build import build_model
from rlhfuse.models.stage import PipelineStage
from rlhfuse.parallel.device import choose_device
from rlhfuse.parallel.groups import GroupMaker, plain_grid
from rlhfuse.parallel.offload import OffloadedWeights
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.simulator.instances import InstanceLimits
from rlhfuse.simulator.lengths import SampleLengths

LAYOUT = ParallelLayout(INSTANCES, 1, 1)
FIRST_TOKEN = 3  # those below may mean something to a model
WARM_STEPS = 2  # of the profile, not counted
NEIGHBOUR_BATCH = 4  # what a rank decodes while the other one is measured
NEIGHBOUR_TOKENS = 64  # of a sample that it scores, in packs as large as a run makes them


class FusionRank:
    """The models of one size on this rank."""

    def __init__(self, rank: int, sizes: Sizes, seed: int) -> None:
        self.rank, self.sizes = rank, sizes
        self.device = choose_device("cpu", 0, 1)
        self.maker = GroupMaker(TIMEOUT_SECONDS)
        self.store = dist.PrefixStore("inter_stage", dist.distributed_c10d._get_default_store())
        modules = {role: self._model(role, seed + number) for number, role in enumerate(ROLES)}
        self.engine = Engine(
            sizes.spec("actor"),
            dict(modules["actor"].named_parameters()),
            EngineOptions(sizes.blocks, BLOCK_TOKENS, sizes.samples, max_batched_tokens=2048),
        )
        self.engine.pause()
        frozen = {role: self._frozen(role, modules[role]) for role in SCORERS}
        self.scorer = Scorer(
            frozen["reference"],
            frozen["critic"],
            frozen["reward"],
            vocab=sizes.vocab,
            temperature=1.0,
            device=self.device.torch_device,
        )
        self.sides = tuple((rank,) for rank in range(INSTANCES))
        alone = self.maker.for_model("generation", plain_grid(LAYOUT), rank).tp
        self.inter_stage = InterStage(
            rank=rank,
            placement=Placement(self.sides, self.sides),
            engine=self.engine,
            scorer=self.scorer,
            store=self.store,
            instance_group=alone,
            worker_group=alone,
            timeout_seconds=TIMEOUT_SECONDS,
            progress=lambda _: None,
        )
        self.iteration = 0
        self.fresh = 1 << 20  # sample ids of the profile: above those of any batch

    def _model(self, role: str, seed: int) -> torch.nn.Module:
        grid = plain_grid(LAYOUT)
        groups = self.maker.for_model(role, grid, self.rank)
        model = build_model(
            self.sizes.spec(role),
            grid,
            groups,
            self.rank,
            scalar_head=role in ("critic", "reward"),
            dtype=torch.float32,
            device=self.device,
        )
        draw_weights(model, seed)
        return model.requires_grad_(False)

    def _frozen(self, role: str, model: torch.nn.Module) -> FrozenModel:
        offloaded = OffloadedWeights(model, self.device)
        offloaded.offload()
        stage = PipelineStage(model, first=True, last=True, scalar_head=role != "reference")
        return FrozenModel(stage, offloaded, self.maker.for_model(role, plain_grid(LAYOUT), self.rank).tp)

    # runs -------------------------------------------------------------------------------------------------------

    def load(self, lengths: SampleLengths, seed: int) -> None:
        """Take a batch: random prompts of these lengths, outputs forced to theirs."""
        generator = torch.Generator().manual_seed(seed)
        self.requests = [
            Request(sample, self._tokens(prompt, generator), forced(output))
            for sample, (prompt, output) in enumerate(zip(lengths.prompt, lengths.output))
        ]

    def run(self, triggers: tuple[int, ...], limits: InstanceLimits, moving: MoveCost) -> RankRun:
        """Generate and score the batch, from a barrier on."""
        self.engine.resume()
        self.iteration += 1
        gc.collect()
        gc.disable()
        try:
            barrier()
            cpu = time.thread_time()
            report = self.inter_stage.run(self.iteration, self.requests, triggers, fusion_limits(limits, moving))
            cpu = time.thread_time() - cpu
        finally:
            gc.enable()
        return rank_run(report, cpu)

    # the profile ------------------------------------------------------------------------------------------------

    def profile(
        self,
        rank: int,
        neighbour: str,
        batches: Sequence[tuple[int, int]],
        packs: Sequence[tuple[int, int]],
        repeats: int,
    ) -> dict[str, list[list[float]]]:
        """What work costs on `rank` while the other one is "idle", "decoding" or "scoring"; the other answers {}.

        `batches`: (sequences, tokens of context of each) of decode steps; `packs`: (sequences, tokens of each) that are
        scored. Rows are as the product's report has them: decode [batch, context, seconds], prefill and score [tokens,
        sequences, seconds], load [seconds].
        """
        self.engine.resume()
        stop = f"stop/{self.iteration}/{rank}/{neighbour}"
        if self.rank != rank:
            self._keep_busy(neighbour, stop)
            found: dict[str, list[list[float]]] = {}
        else:
            barrier()
            found = {"decode": [], "prefill": [], "score": [], "load": []}
            for batch, context in batches:
                for kind, row in self._decode(batch, context, repeats):
                    found[kind].append(row)
            for _ in range(repeats):
                self.scorer.release()
                self._score(1, 2)  # by all models: then all are there
                found["load"].append([self.scorer.load_seconds])
            for sequences, tokens in packs:
                self._score(sequences, tokens)  # once unmeasured
                found["score"] += [self._score(sequences, tokens) for _ in range(repeats)]
            self.store.set(stop, b"1")
        self.scorer.release()
        self.engine.pause()
        barrier()
        return found

    def _keep_busy(self, neighbour: str, stop: str) -> None:
        if neighbour == "scoring":
            self._score(1, 2)
        barrier()
        if neighbour == "idle":
            return
        while not self.store.check([stop]):
            if neighbour == "scoring":
                self._score(self.sizes.score_tokens // NEIGHBOUR_TOKENS, NEIGHBOUR_TOKENS)
                continue
            if not self.engine.has_unfinished():
                self._add(NEIGHBOUR_BATCH, 1, self.sizes.max_output)
            self.engine.step()
        for state in self.engine.unfinished():
            self.engine.abort(state.sample_id)

    def _decode(self, batch: int, context: int, repeats: int) -> list[tuple[str, list[float]]]:
        self._add(batch, context, WARM_STEPS + repeats + 1)
        rows: list[tuple[str, list[float]]] = []
        while self.engine.has_unfinished():
            self.engine.step()
            step = self.engine.last_step
            if step.prefill_tokens:
                rows.append(("prefill", [step.prefill_tokens, step.batch, step.seconds]))
            else:
                rows.append(("decode", [step.batch, step.context_tokens, step.seconds]))
        decoded = [row for row in rows if row[0] == "decode"]
        return [row for row in rows if row[0] == "prefill"] + decoded[WARM_STEPS:]

    def _score(self, sequences: int, tokens: int) -> list[float]:
        """Score one pack; returns its row."""
        generator = torch.Generator().manual_seed(sequences)
        half = tokens // 2

        def rollout(sample: int) -> Rollout:
            prompt, response = self._tokens(tokens - half, generator), self._tokens(half, generator)
            return Rollout(sample, prompt, response, torch.zeros(half), "stop")

        _, work = self.scorer.score([rollout(sample) for sample in range(sequences)])
        return [work.tokens, work.samples, work.seconds]

    def _add(self, sequences: int, context: int, output: int) -> None:
        generator = torch.Generator().manual_seed(self.fresh)
        for _ in range(sequences):
            self.engine.add(self.fresh, self._tokens(context, generator), forced(output))
            self.fresh += 1

    def _tokens(self, count: int, generator: torch.Generator) -> tuple[int, ...]:
        return tuple(torch.randint(FIRST_TOKEN, self.sizes.vocab, (count,), generator=generator).tolist())

    def migration(self, contexts: Sequence[int], repeats: int) -> list[list[float]]:
        """[bytes, seconds] of moving one sample's keys and values from rank 0 to rank 1; known to the sender."""
        self.engine.resume()
        rows = []
        heads = HeadPlan.between(self.sides[0], self.sides[1], self.engine.spec.kv_heads)
        for context in contexts:
            for _ in range(repeats):
                if self.rank == 0:
                    self._add(1, context, 4)
                    self.engine.step()
                barrier()
                start = time.perf_counter()
                if self.rank == 1:
                    receive_sequences(self.engine, heads, self.rank)
                    for state in self.engine.unfinished():
                        self.engine.abort(state.sample_id)
                    continue
                sample = self.engine.unfinished()[0].sample_id
                with self.engine.export_sequences([sample], "kv") as transfer:
                    sent = send_sequences(transfer, heads, self.rank)
                rows.append([sent, time.perf_counter() - start])
        self.engine.pause()
        return rows

    def close(self) -> None:
        self.maker.close()


def fusion_limits(limits: InstanceLimits, moving: MoveCost) -> FusionLimits:
    return FusionLimits(
        bs_max=limits.bs_max,
        sample_kv_bytes=limits.sample_kv_bytes,
        capacity_kv_bytes=limits.kv_capacity_bytes,
        block_tokens=limits.block_tokens,
        move_cost=moving,
        score_tokens=limits.score_tokens,
    )


def forced(output: int) -> SamplingParams:
    return SamplingParams(max_tokens=output, ignore_eos=True, seed=1)


def rank_run(report: GenInferReport, cpu_seconds: float) -> RankRun:
    """In words that need no torch to be read."""
    return RankRun(
        begin=report.begin_seconds,
        total_seconds=report.total_seconds,
        generation_seconds=report.generation_seconds,
        spans=tuple((span.kind, span.start_seconds, span.end_seconds) for span in report.spans),
        plans=tuple(str(plan) for plan in report.plans),
        migrated_samples=report.migrated_samples,
        migrated_bytes=report.migrated_bytes,
        needed_bytes=report.bytes_needed,
        early=report.scored_before_generation_end,
        observed_seconds={kind: sum(map(seconds_of, rows)) for kind, rows in report.observations.items()},
        cpu_seconds=cpu_seconds,
        agreement_seconds=report.agreement_seconds,
        pause_seconds=report.pause_seconds,
        digest=digest(report.rollouts),
    )


def seconds_of(row: Sequence[Any]) -> float:
    """Of an observation: its last number, behind which the neighbour may be named."""
    return [value for value in row if not isinstance(value, str)][-1]


def digest(rollouts: Sequence[Rollout]) -> str:
    """Of tokens and bits of every number."""
    sha = hashlib.sha256(RolloutBatch.from_rollouts(rollouts).digest().encode())
    for rollout in rollouts:
        for values in (rollout.ref_logprobs, rollout.values, torch.tensor(rollout.score, dtype=torch.float32)):
            sha.update(values.contiguous().numpy().tobytes())
    return sha.hexdigest()


def barrier() -> None:
    dist.all_reduce(torch.zeros(1))


def begin(rank: int) -> None:
    """Join the other ranks, with one thread each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=INSTANCES)
