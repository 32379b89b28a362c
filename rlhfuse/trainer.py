"""PPO with both fusions: one iteration after another, as one story.

    draw prompts -> actor and critic into their generation and inference layouts -> generate and score (fused or
    serial) -> rewards and advantages over the whole batch -> mini-batches through the fused pipeline -> lengths
    give the next R_t -> one line of metrics

Every rank runs this same program; there is no master. What all ranks must agree on is computed by each from the
same numbers, or by rank 0 and sent. Fusion changes when things happen, never what comes out.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhfuse.checkpoint import TRAINED, mark_finished, rewind, save_checkpoint
from rlhfuse.data.sampler import PromptSampler, sample_id
from rlhfuse.forecast import PHASES, Batch, Forecast, Forecaster, Measured
from rlhfuse.fusion.inference import Scorer
from rlhfuse.fusion.inter_stage import GenInferReport, InterStage, Request
from rlhfuse.fusion.training_step import MinibatchResult, TrainingStep
from rlhfuse.gen.engine import Engine, EngineOptions
from rlhfuse.gen.sequence import SamplingParams
from rlhfuse.models.hf import export_checkpoint
from rlhfuse.monitor.console import ProgressPrinter
from rlhfuse.monitor.metrics import MetricsWriter
from rlhfuse.monitor.trace import Span, save_trace
from rlhfuse.monitor.watchdog import Watchdog
from rlhfuse.parallel.collect import all_gather_bytes
from rlhfuse.parallel.device import Device
from rlhfuse.parallel.optimizer_state import check_exportable, export_state, import_state
from rlhfuse.parallel.reshard import Resharder
from rlhfuse.ppo.advantage import add_advantages, add_token_rewards
from rlhfuse.ppo.balance import cut_minibatches
from rlhfuse.ppo.losses import actor_metrics, critic_metrics
from rlhfuse.ppo.metrics import batch_metrics
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.preflight import Prepared
from rlhfuse.roles import Roles, build_roles, whole_copy
from rlhfuse.schedule.lowering import lower
from rlhfuse.schedule.program_times import makespan
from rlhfuse.schedule.schedule import Schedule
from rlhfuse.simulator.hardware import hardware_by_name
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.plan import Plan
from rlhfuse.simulator.planner import job_cost, kv_blocks, task_costs
from rlhfuse.threshold_control import ThresholdControl
from rlhfuse.timeline import StageTimes, gen_infer_spans, phase_spans, training_spans


@dataclass
class Phases:
    """Wall time of each part of the running iteration, and what this rank did in it."""

    rank: int
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)

    def note(self, name: str, kind: str, start: float, end: float, **args: Any) -> None:
        self.spans.append(Span(name, kind, self.rank, start, max(start, end), args=args))


def lengths_of(batch: RolloutBatch) -> SampleLengths:
    return SampleLengths(tuple(batch.prompt_lengths.tolist()), tuple(batch.response_lengths.tolist()))


class Trainer:
    """Everything of a run on one rank."""

    def __init__(
        self, prepared: Prepared, plan: Plan, schedule: Schedule, rank: int, device: Device, store: dist.Store,
        watchdog: Watchdog, run_dir: Path,
    ) -> None:  # fmt: skip
        config = prepared.config
        self.config, self.prepared, self.plan, self.schedule = config, prepared, plan, schedule
        self.rank, self.device, self.run_dir = rank, device, run_dir
        self.watchdog = watchdog
        watchdog.progress("building models")
        self.roles: Roles = build_roles(config, prepared.checkpoints, prepared.ranks, rank, device)
        self.resharder = Resharder(device)
        self.engine = self._build_engine()
        self.scorer = Scorer(
            self.roles.reference, self.roles.critic_frozen, self.roles.reward,
            vocab=prepared.checkpoints.specs["reference"].vocab, temperature=config.rollout.temperature,
            device=device.torch_device,
        )  # fmt: skip
        models = {"actor": self.roles.actor, "critic": self.roles.critic}
        self.programs = lower(schedule, prepared.ranks, tied=prepared.tied)
        self.training = TrainingStep(
            rank, prepared.ranks, schedule, self.programs, models, self.roles.channels, config.algorithm,
            config.rollout.temperature, device.torch_device, watchdog.progress,
        )  # fmt: skip
        self.microbatches = {"actor": plan.batch.actor_microbatches, "critic": plan.batch.critic_microbatches}
        hardware = hardware_by_name(config.trainer.hardware, device.torch_device.type)
        specs = prepared.checkpoints.specs
        analytic = job_cost(task_costs(config, specs, prepared.tasks, hardware), prepared.world_size)
        self.threshold = ThresholdControl(config, plan, specs, analytic, device)
        self.stage_times = StageTimes()
        self.forecaster = Forecaster(self.programs, prepared.ranks)
        self.inter_stage = InterStage(
            rank, self.roles.placement, self.engine, self.scorer, store,
            instance_group=self.roles.generation_tp, worker_group=self.roles.reference.tp_group,
            timeout_seconds=config.trainer.hang_seconds, progress=watchdog.progress,
            bucket_bytes=config.fusion.bucket_mib << 20,
        )  # fmt: skip
        self.sampler = PromptSampler(len(prepared.prompts), config.trainer.seed)

    def _build_engine(self) -> Engine:
        config, spec = self.config, self.prepared.checkpoints.specs["actor"]
        rollout = config.rollout
        engine = Engine(
            spec,
            dict(self.roles.generation.named_parameters()),
            EngineOptions(
                block_tokens=rollout.block_tokens,
                num_blocks=kv_blocks(config, self.plan.batch.instances),
                max_sequences=rollout.max_sequences_per_instance,
                max_batched_tokens=rollout.max_batched_tokens,
                cuda_graphs=rollout.cuda_graphs,
            ),
            device=self.device.torch_device,
            dtype=next(self.roles.generation.parameters()).dtype,
            tp_group=self.roles.generation_tp if dist.get_world_size(self.roles.generation_tp) > 1 else None,
        )
        engine.pause()
        return engine

    # the loop -------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Run all iterations that are not done yet, then export both models."""
        trainer = self.config.trainer
        leads = self.rank == 0
        first = self._restore()
        if leads and (stale := rewind(self.run_dir, first)):
            print(f"removed from {self.run_dir / 'checkpoints'}: {', '.join(stale)}", flush=True)
        writer = MetricsWriter(self.run_dir / "metrics.jsonl", first_iteration=first) if leads else None
        board = self._tensorboard(first) if leads and trainer.tensorboard else None
        printer = ProgressPrinter(trainer.iterations)
        kept: list[list[Span]] = []
        for iteration in range(first, trainer.iterations):
            metrics, spans = self.iterate(iteration)
            kept = [*kept, spans][-trainer.trace_iterations :]
            if leads:
                writer.write(metrics)
                if board:
                    board.log(metrics)
                printer.print(metrics)
                save_trace([span for one in kept for span in one], self.run_dir / "trace.json")
                self.threshold.save_costs(self.run_dir / "costs.json")
            if self._save_due(iteration + 1):
                self.save(iteration + 1)
        if trainer.export:
            self.export()
        for opened in (writer, board):
            if opened:
                opened.close()
        if leads:
            mark_finished(self.run_dir, trainer.iterations)

    def iterate(self, iteration: int) -> tuple[dict[str, Any], list[Span]]:
        """One PPO iteration; returns its metrics and, on rank 0, every rank's spans."""
        begin = time.time()
        phases = Phases(self.rank)
        self.watchdog.progress(f"iteration {iteration}: moving weights")
        self._move_weights(phases)
        used = self.threshold.triggers
        report = self.inter_stage.run(iteration, self._requests(iteration), used, self.threshold.limits)
        for span in report.spans:
            phases.note(span.kind, span.kind, span.start_seconds, span.end_seconds)
        start = time.time()
        batch = RolloutBatch.from_rollouts(report.rollouts)
        batch = add_advantages(add_token_rewards(batch, self.config.algorithm), self.config.algorithm)
        phases.seconds["adv"] = time.time() - start
        phases.note("adv", "adv", start, time.time())
        results = self._train(iteration, batch, phases)
        everyone = self._exchange(phases, results)
        metrics = self._metrics(iteration, batch, report, results, everyone, used)
        metrics["timing_s/step"] = time.time() - begin
        metrics["perf/time_per_step"] = metrics["timing_s/step"]
        metrics["perf/total_num_tokens"] = len(batch.tokens)
        metrics["perf/throughput"] = len(batch.tokens) / metrics["timing_s/step"]
        metrics["perf/samples_per_second"] = len(batch) / metrics["timing_s/step"]
        lengths = lengths_of(batch)
        forecast = self._forecast(used, lengths) if self.rank == 0 else None
        message = self.threshold.observe(iteration, report, batch)
        if message and self.rank == 0:
            print(message, flush=True)
        seconds = {phase: metrics[f"timing_s/{phase}"] for phase in PHASES}
        self.forecaster.observe(Measured(seconds, len(batch.tokens), len(results), self.stage_times))
        spans = [Span(**span) for one in everyone for span in one["spans"]]
        if self.rank == 0:
            metrics |= forecast.metrics() if forecast else {}
            spans += self._predicted(forecast or self._forecast(used, lengths), begin, results)
        return metrics, spans

    def _requests(self, iteration: int) -> list[Request]:
        """The whole batch's samples, the same on every rank."""
        rollout, prompts = self.config.rollout, self.prepared.prompts
        params = SamplingParams(
            temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p,
            max_tokens=rollout.max_response_tokens, seed=self.config.trainer.seed,
        )  # fmt: skip
        drawn = self.sampler.prompts_of(iteration, rollout.prompts_per_iteration)
        return [
            Request(sample_id(iteration, place, copy), tuple(prompts[index].tokens), params)
            for place, index in enumerate(drawn)
            for copy in range(rollout.samples_per_prompt)
        ]

    def _move_weights(self, phases: Phases) -> None:
        """Actor into the generation layout; critic into the inference layout and parked in host memory."""
        start = time.time()
        self.resharder.move(self.roles.actor.optimizer.modules.values(), self.roles.generation)
        parked = self.roles.critic_frozen.parked
        parked.allocate()
        self.resharder.move(self.roles.critic.optimizer.modules.values(), parked.module)
        parked.park()
        self.engine.load_weights(dict(self.roles.generation.named_parameters()))
        self.engine.resume()
        phases.seconds["reshard"] = time.time() - start
        phases.note("reshard", "reshard", start, time.time())

    def _train(self, iteration: int, batch: RolloutBatch, phases: Phases) -> list[MinibatchResult]:
        start = time.time()
        algorithm = self.config.algorithm
        results = []
        wall = time.time() - time.perf_counter()
        for number, indices in enumerate(
            cut_minibatches(len(batch), algorithm.minibatches, self.config.trainer.seed, iteration)
        ):
            self.watchdog.progress(f"iteration {iteration}: training mini-batch {number}")
            lr = {role: self._lr(role, iteration) for role in ("actor", "critic")}
            results.append(self.training.run(batch.select(indices), self.microbatches, lr))
            for span in results[-1].spans:
                kind = f"{span.action.pipeline.split('.')[0]} {span.action.kind}"
                phases.note(str(span.action), kind, wall + span.start_seconds, wall + span.end_seconds)
        phases.seconds["train"] = time.time() - start
        return results

    def _lr(self, role: str, iteration: int) -> float:
        optim = getattr(self.config, role).optim
        return optim.lr * min(1.0, (iteration + 1) / max(optim.warmup_iterations, 1))

    # what is reported -----------------------------------------------------------------------------------------

    def _exchange(self, phases: Phases, results: list[MinibatchResult]) -> list[dict]:
        """Every rank's sums, times and spans."""
        mine = {
            "stats": [{role: {k: float(v) for k, v in s.items()} for role, s in r.stats.items()} for r in results],
            "seconds": dict(phases.seconds),
            "program_seconds": sum(r.program_seconds for r in results),
            "stage_times": StageTimes.of(results).to_list(),
            "spans": [vars(span) for span in phases.spans],
            "memory_bytes": torch.cuda.max_memory_allocated() if self.device.is_cuda else 0,
        }
        everyone = [json.loads(data) for data in all_gather_bytes(json.dumps(mine).encode())]
        self.stage_times = StageTimes.merge([StageTimes.from_list(one["stage_times"]) for one in everyone])
        return everyone

    def _metrics(
        self, iteration: int, batch: RolloutBatch, report: GenInferReport, results: list[MinibatchResult],
        everyone: list[dict], used: tuple[int, ...],
    ) -> dict[str, Any]:  # fmt: skip
        tokens = sum(result.tokens for result in results)
        sums: dict[str, dict[str, float]] = {"actor": defaultdict(float), "critic": defaultdict(float)}
        for one in everyone:
            for stats in one["stats"]:
                for role, values in stats.items():
                    for name, value in values.items():
                        sums[role][name] += value
        first = sum(one["stats"][0].get("actor", {}).get("logprob_abs_diff", 0.0) for one in everyone)
        seconds = {key: max(one["seconds"].get(key, 0.0) for one in everyone) for key in ("reshard", "adv", "train")}
        metrics: dict[str, Any] = {"iteration": iteration, **batch_metrics(batch, self.config.algorithm)}
        metrics |= actor_metrics(sums["actor"], tokens) | critic_metrics(sums["critic"], tokens)
        for role in ("actor", "critic"):
            metrics[f"{role}/grad_norm"] = sum(r.steps[role].grad_norm for r in results) / len(results)
            metrics[f"{role}/lr"] = results[-1].steps[role].lr
        metrics |= {f"timing_s/{name}": value for name, value in seconds.items()}
        metrics |= {
            "critic/score/std": float(batch.scores.double().std(correction=0)),
            "rollout/train_logprob_abs_diff": first / results[0].tokens,
            "rollout/digest": batch.digest(),
            "rollout/scores_digest": hashlib.sha256(batch.scores.numpy().tobytes()).hexdigest(),
            "lengths/prompt": batch.prompt_lengths.tolist(),
            "lengths/output": batch.response_lengths.tolist(),
            "timing_s/gen": report.generation_seconds,
            "timing_s/infer": max(report.total_seconds - report.generation_seconds, 0.0),
            "fusion/threshold": used[0] if used else 0,
            "fusion/instances": len(self.roles.placement.instances),
            "fusion/destinations": len(report.plans[0].destinations) if report.plans else 0,
            "fusion/migrated_samples": report.migrated_samples,
            "fusion/migrated_bytes": report.migrated_bytes,
            "fusion/recomputed_samples": report.recomputed_samples,
            "fusion/scored_before_generation_end": report.scored_before_generation_end,
            "fusion/gen_infer_seconds": report.total_seconds,
            "fusion/makespan_predicted_seconds": self._predicted_makespan(len(results)),
            "fusion/makespan_measured_seconds": max(one["program_seconds"] for one in everyone),
        }
        if self.device.is_cuda:
            metrics["perf/max_memory_allocated_gb"] = max(one["memory_bytes"] for one in everyone) / 1e9
        return metrics

    def _forecast(self, used: tuple[int, ...], lengths: SampleLengths) -> Forecast | None:
        """What the iterations so far say of one with these lengths; None before the first."""
        if not self.forecaster.ready:
            return None

        def batch(one: SampleLengths) -> Batch:
            return Batch(self.threshold.simulate(used, one), sum(one.prompt) + sum(one.output))

        return self.forecaster.forecast(batch(lengths), [batch(one) for one in self.threshold.recent_lengths])

    def _predicted(self, forecast: Forecast, begin: float, results: list[MinibatchResult]) -> list[Span]:
        """The iteration as it was expected to be, the first one as its own costs say."""
        seconds, timeline = forecast.known, forecast.timeline
        ranks = range(self.prepared.world_size)
        spans = phase_spans("reshard", ranks, begin, seconds["reshard"])
        begin += seconds["reshard"]
        spans += gen_infer_spans(timeline, self.roles.placement, begin)
        begin += timeline.total_seconds
        spans += phase_spans("adv", ranks, begin, seconds["adv"])
        starts = [result.spans[0].start_seconds for result in results]
        return spans + training_spans(forecast.step_times, begin + seconds["adv"], starts)

    def _predicted_makespan(self, minibatches: int) -> float:
        """Of this iteration's mini-batches, from the times its actions took, each on its own core or GPU."""
        return minibatches * makespan(self.stage_times.step_times(self.programs, self.prepared.ranks))

    def _tensorboard(self, first_iteration: int):
        from rlhfuse.monitor.loggers import TensorBoardLogger

        return TensorBoardLogger(self.run_dir / "tensorboard", first_iteration)

    # checkpoints ----------------------------------------------------------------------------------------------

    def _save_due(self, done: int) -> bool:
        """Every `save_every` iterations, and after the last, so that a finished run can be extended."""
        every = self.config.trainer.save_every
        return every > 0 and (done % every == 0 or done == self.config.trainer.iterations)

    def save(self, done: int) -> None:
        """Write checkpoints/iteration-`done`; a collective."""
        self.watchdog.progress(f"saving checkpoint iteration-{done}")
        start = time.time()
        tensors = {role: export_state(getattr(self.roles, role).optimizer) for role in TRAINED}
        size = save_checkpoint(
            self.run_dir, done, self.rank, tensors, self.prepared.facts, self.threshold.state(),
            self.config.trainer.keep_checkpoints,
        )  # fmt: skip
        if self.rank == 0:
            print(f"saved checkpoints/iteration-{done}: {size / 1e6:.1f} MB in {time.time() - start:.2f} s", flush=True)

    def _restore(self) -> int:
        """Take the checkpoint to resume from in, if any; returns the first iteration to run."""
        if self.config.trainer.save_every or self.prepared.resume:
            for role in TRAINED:
                check_exportable(getattr(self.roles, role).optimizer)
        if not self.prepared.resume:
            return 0
        self.watchdog.progress(f"loading {self.prepared.resume.folder}")
        tensors = self.prepared.resume.load(self.rank)
        for role in TRAINED:
            import_state(getattr(self.roles, role).optimizer, tensors[role])
        self.threshold.restore(dict(self.prepared.resume.manifest.threshold), str(self.prepared.resume.folder))
        return self.prepared.resume.iteration

    def export(self) -> None:
        """Write actor and critic in Hugging Face layout; a collective."""
        self.watchdog.progress("exporting models")
        for role, head in (("actor", False), ("critic", True)):
            trained = getattr(self.roles, role)
            copy = whole_copy(self.config, self.prepared.checkpoints, role, self.rank, self.device)
            self.resharder.move(trained.optimizer.modules.values(), copy)
            if self.rank == 0:
                paths, specs = self.prepared.checkpoints.paths, self.prepared.checkpoints.specs
                weights = dict(copy.named_parameters())
                export_checkpoint(weights, specs[role], head, paths[role], self.run_dir / "export" / role)
        dist.barrier()
