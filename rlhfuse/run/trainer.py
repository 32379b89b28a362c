"""PPO with both fusions: one iteration after another, as one story.

    draw prompts -> actor and critic into their generation and inference layouts -> generate and score (fused or
    serial) -> rewards and advantages over the whole batch -> mini-batches through the fused pipeline -> lengths
    give the next R_t -> one line of metrics

Algorithms without a critic go the same way, with one model to train and as many to score as the run has.

Every rank runs this same program; there is no master. What all ranks must agree on is computed by each from the
same numbers, or by rank 0 and sent. Fusion changes when things happen, never what comes out.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhfuse.checkpoint.checkpoint import RunState, metrics_kept
from rlhfuse.checkpoint.writer import CheckpointWriter, mark_finished, rewind
from rlhfuse.config.role import SCORING_ORDER, Role
from rlhfuse.config.settings import AlgorithmConfig
from rlhfuse.data.sampler import PromptSampler, prompt_groups, sample_id
from rlhfuse.fusion.inter.generation import Request
from rlhfuse.fusion.inter.inference import Scorer
from rlhfuse.fusion.inter.inter_stage import InterStage
from rlhfuse.fusion.intra.training_step import MinibatchResult, TrainingStep
from rlhfuse.gen.engine import Engine
from rlhfuse.models.hf_folder import export_checkpoint
from rlhfuse.monitor.samples import SampleText
from rlhfuse.monitor.trace import Span
from rlhfuse.monitor.watchdog import Watchdog
from rlhfuse.parallel.device import Device
from rlhfuse.parallel.memory import PhaseMeter
from rlhfuse.parallel.offload import WeightMemory
from rlhfuse.parallel.optimizer_state import check_exportable, export_state, import_state
from rlhfuse.parallel.peak_rate import peak_flops, peak_line
from rlhfuse.parallel.reshard import Resharder
from rlhfuse.planning.run_plan import RunPlan
from rlhfuse.ppo.adaptive import KLController, RunningMoments
from rlhfuse.ppo.advantage import add_advantages
from rlhfuse.ppo.balance import cut_minibatches
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.ppo.token_rewards import add_token_rewards, combine_rewards, sample_kl
from rlhfuse.run.function_reward import FunctionRewarder
from rlhfuse.run.iteration_recorder import IterationRecorder, IterationResult
from rlhfuse.run.phases import Phases
from rlhfuse.run.preflight import RunInputs
from rlhfuse.run.roles import DTYPES, Roles, build_roles, engine_options, sampling_params, whole_copy
from rlhfuse.run.run_log import RunLog
from rlhfuse.run.threshold_controller import ThresholdController


class Trainer:
    """Everything of a run on one rank."""

    def __init__(
        self,
        inputs: RunInputs,
        plan: RunPlan,
        rank: int,
        device: Device,
        store: dist.Store,
        watchdog: Watchdog,
        run_dir: Path,
    ) -> None:
        config = inputs.config
        self.config, self.inputs, self.plan = config, inputs, plan
        self.rank, self.device, self.run_dir = rank, device, run_dir
        self.watchdog = watchdog
        watchdog.progress("building models")
        self.memory = PhaseMeter(device, config.trainer.return_memory)
        self.roles: Roles = build_roles(config, inputs.checkpoints, plan.ranks, rank, device)
        self.resharder = Resharder(device, bucket_bytes=config.fusion.bucket_mib << 20)
        self.generation_memory = WeightMemory(self.roles.generation, device)
        self.engine = self._build_engine()
        self.scorer = Scorer(
            *(self.roles.frozen.get(role) for role in SCORING_ORDER),
            vocab=inputs.checkpoints.specs[Role.ACTOR].vocab,
            temperature=config.rollout.temperature,
            device=device.torch_device,
        )
        self.training = TrainingStep(
            rank,
            plan.ranks,
            plan.schedule,
            plan.programs,
            self.roles.trained,
            self.roles.channels,
            config.rollout.temperature,
            watchdog.progress,
        )
        actor = inputs.checkpoints.specs[Role.ACTOR]
        self.threshold = ThresholdController(config, plan.report, actor, plan.costs, plan.costs_name, device)
        self.peak_flops = peak_flops(config.trainer.peak_tflops, DTYPES[config.trainer.dtype], device)
        self.sampler = PromptSampler(len(inputs.prompts), config.trainer.seed)
        self.rewarder = self._start_rewarder()
        self.kl = KLController(config.algorithm.kl_coef, config.algorithm.kl_target, config.algorithm.kl_horizon)
        self.spread = RunningMoments()
        self.recorder = IterationRecorder(
            inputs, plan.report, self.roles.placement, rank, self.threshold, self.peak_flops
        )
        self.checkpoints = CheckpointWriter(
            run_dir,
            rank,
            inputs.world_size,
            inputs.facts,
            config.trainer.keep_checkpoints,
            config.trainer.hang_seconds,
        )
        self.inter_stage = InterStage(
            rank=rank,
            placement=self.roles.placement,
            engine=self.engine,
            scorer=self.scorer,
            store=store,
            rewarder=self.rewarder,
            instance_group=self.roles.generation_tp,
            worker_group=self.roles.worker_tp,
            timeout_seconds=config.trainer.hang_seconds,
            progress=watchdog.progress,
            bucket_bytes=config.fusion.bucket_mib << 20,
            generation_done=self._release_generation,
        )

    def _build_engine(self) -> Engine:
        engine = Engine(
            self.inputs.checkpoints.specs[Role.ACTOR],
            dict(self.roles.generation.named_parameters()),
            engine_options(self.config, self.plan.report.batch.instances),
            device=self.device.torch_device,
            dtype=next(self.roles.generation.parameters()).dtype,
            tp_group=self.roles.generation_tp if dist.get_world_size(self.roles.generation_tp) > 1 else None,
        )
        engine.pause()
        return engine

    def _release_generation(self) -> None:
        """This rank decodes no more in this iteration: the actor's copy for generation goes, before others come in."""
        self.engine.release_weights()
        self.generation_memory.release()
        self.memory.switch("inference")

    def _start_rewarder(self) -> FunctionRewarder | None:
        """The first rank of each instance has the processes that call the reward function."""
        placement = self.roles.placement
        leads = placement.instances[placement.instance_of(self.rank)][0] == self.rank
        return FunctionRewarder(self.inputs, self.sampler) if self.config.reward.function and leads else None

    # the loop -------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Run all iterations that are not done yet, then export the models that were trained.

        Raises JointError where a file cannot be written; what was saved before stays.
        """
        first = self._restore()
        # What is there now stays: a full collection that walks it takes a third of a second, in any phase.
        gc.collect()
        gc.freeze()
        try:
            self._fit(first)
        finally:
            gc.unfreeze()

    def _fit(self, first: int) -> None:
        """From iteration `first` on."""
        leads = self.rank == 0
        with self.checkpoints.joint_failure():
            log = self._start_log(first) if leads else None
        if leads:
            print(peak_line(self.peak_flops, self.device), flush=True)
        for iteration in range(first, self.config.trainer.iterations):
            try:
                metrics, spans, samples = self.iterate(iteration)
            except FloatingPointError as error:
                raise FloatingPointError(f"iteration {iteration}: {error}; {self.checkpoints.last_good()}") from error
            due, position = self._save_due(iteration + 1), 0
            with self.checkpoints.joint_failure():
                if log:
                    log.write(metrics, spans, samples)
                    self.threshold.save_costs(self.run_dir / "costs.json")
                    position = log.position() if due else 0
            if due:
                self.save(iteration + 1, position)
        if self.config.trainer.export:
            self.export()
        self.checkpoints.finish()
        with self.checkpoints.joint_failure():
            for opened in (log, self.rewarder):
                if opened:
                    opened.close()
            if leads:
                mark_finished(self.run_dir, self.config.trainer.iterations)

    def _start_log(self, first: int) -> RunLog:
        """Of a run that goes on with iteration `first`; what it is going to write again is removed."""
        if stale := rewind(self.run_dir, first):
            print(f"removed from {self.run_dir / 'checkpoints'}: {', '.join(stale)}", flush=True)
        kept = metrics_kept(self.inputs.resume, self.run_dir)
        return RunLog(self.run_dir, self.config, self.plan.report, first, kept)

    def iterate(self, iteration: int) -> tuple[dict[str, Any], list[Span], list[SampleText]]:
        """One PPO iteration; returns its metrics, every rank's spans, a few samples."""
        begin = self.recorder.begin()
        phases = Phases(self.rank, iteration)
        self.watchdog.progress(f"iteration {iteration}: moving weights")
        self._move_weights(phases)
        used = self.threshold.threshold
        report = self.inter_stage.run(iteration, self._requests(iteration), used, self.threshold.limits)
        phases.note_generation(report)
        start = time.time()
        batch = RolloutBatch.from_rollouts(report.rollouts)
        batch = combine_rewards(batch, report.function_scores, self.config.reward)
        algorithm = self._effective_config(batch)
        batch = add_token_rewards(batch, algorithm, self.config.rollout.max_response_tokens)
        batch = add_advantages(batch, algorithm, prompt_groups(batch.sample_ids))
        phases.done("adv", start)
        results = self._train(iteration, batch, algorithm, phases)
        if batch.ref_logprobs is not None:
            self.kl = self.kl.after(float(sample_kl(batch).mean()), len(batch))
        peaks = {"base": self.memory.base_bytes, **self.memory.take()}
        done = IterationResult(iteration, begin, used, report, batch, algorithm, results, phases, peaks)
        return self.recorder.finish(done)

    def _requests(self, iteration: int) -> list[Request]:
        """The whole batch's samples, the same on every rank."""
        rollout, prompts = self.config.rollout, self.inputs.prompts
        params = sampling_params(self.config)
        drawn = self.sampler.prompts_of(iteration, rollout.prompts_per_iteration)
        return [
            Request(sample_id(iteration, place, copy), tuple(prompts[index].tokens), params)
            for place, index in enumerate(drawn)
            for copy in range(rollout.samples_per_prompt)
        ]

    def _effective_config(self, batch: RolloutBatch) -> AlgorithmConfig:
        """The algorithm's settings of this iteration: the KL's weight and the scale of scores follow the run."""
        algorithm = self.config.algorithm.model_copy(update={"kl_coef": self.kl.coef})
        if not algorithm.scale_scores:
            return algorithm
        self.spread = self.spread.after(batch.scores)
        return algorithm.model_copy(update={"score_scale": algorithm.score_scale / self.spread.std})

    def _move_weights(self, phases: Phases) -> None:
        """Actor into the generation layout; a critic into the inference layout and offloaded in host memory."""
        start = time.time()
        for model in self.roles.trained.values():
            model.optimizer.release_gradients()
        self.memory.switch("moves")
        self.generation_memory.allocate()
        self.resharder.reshard(self.roles.actor.optimizer.modules.values(), self.roles.generation)
        if Role.CRITIC in self.roles.trained:
            offloaded = self.roles.frozen[Role.CRITIC].offloaded
            offloaded.allocate()
            self.resharder.reshard(self.roles.trained[Role.CRITIC].optimizer.modules.values(), offloaded.module)
            offloaded.offload()
        self.engine.load_weights(dict(self.roles.generation.named_parameters()))
        self.memory.switch("generation")
        self.memory.note_base(self.roles.held_bytes(with_host=not self.device.is_cuda))
        self.engine.resume()
        phases.done("reshard", start)

    def _train(
        self, iteration: int, batch: RolloutBatch, algorithm: AlgorithmConfig, phases: Phases
    ) -> list[MinibatchResult]:
        start = time.time()
        self.memory.switch("training")
        seed = self.config.trainer.seed
        results = []
        lr = {role: self._lr(role, iteration) for role in self.roles.trained}
        cuts = [
            indices
            for epoch in range(algorithm.epochs)
            for indices in cut_minibatches(len(batch), algorithm.minibatches, seed, iteration, epoch)
        ]
        microbatches = self.plan.report.batch.microbatches_of
        for number, indices in enumerate(cuts):
            self.watchdog.progress(f"iteration {iteration}: training mini-batch {number}")
            results.append(self.training.run(batch.select(indices), microbatches, lr, algorithm))
        phases.note_training(results, start)
        return results

    def _lr(self, role: Role, iteration: int) -> float:
        optim = getattr(self.config, role).optim
        return optim.lr * min(1.0, (iteration + 1) / max(optim.warmup_iterations, 1))

    # checkpoints ----------------------------------------------------------------------------------------------

    def _save_due(self, done: int) -> bool:
        """Every `save_every` iterations, and after the last, so that a finished run can be extended."""
        every = self.config.trainer.save_every
        return every > 0 and (done % every == 0 or done == self.config.trainer.iterations)

    def save(self, done: int, metrics_bytes: int) -> None:
        """Begin to write checkpoints/iteration-`done`; a collective. Rank 0 gives the length of metrics.jsonl."""
        self.watchdog.progress(f"saving checkpoint iteration-{done}")
        position = {
            "metrics_bytes": metrics_bytes,
            "prompts_drawn": done * self.config.rollout.prompts_per_iteration,
            "learning_rate": {role: self._lr(role, done - 1) for role in self.roles.trained},
        }
        carried = {"kl_coef": self.kl.coef, "scores": asdict(self.spread)}
        state = RunState(self.threshold.state(), carried, position)
        self.checkpoints.start(
            done, state, {role: export_state(model.optimizer) for role, model in self.roles.trained.items()}
        )

    def _restore(self) -> int:
        """Take the checkpoint to resume from in, if any; returns the first iteration to run."""
        if self.config.trainer.save_every or self.inputs.resume:
            for model in self.roles.trained.values():
                check_exportable(model.optimizer)
        if not (resume := self.inputs.resume):
            return 0
        self.watchdog.progress(f"loading {resume.folder}")
        for role, model in self.roles.trained.items():
            import_state(model.optimizer, partial(resume.reader.read, role), partial(resume.reader.step, role))
        state, moved = resume.manifest.state, self.inputs.facts.layout_diff(resume.manifest.facts)
        if self.kl.target:
            self.kl = replace(self.kl, coef=state.algorithm["kl_coef"])
        if self.config.algorithm.scale_scores:
            self.spread = RunningMoments(**state.algorithm["scores"])
        self.threshold.restore(dict(state.threshold), str(resume.folder), lengths_alone=bool(moved))
        return resume.iteration

    def export(self) -> None:
        """Write the trained models in Hugging Face layout; a collective."""
        self.watchdog.progress("exporting models")
        for role, trained in self.roles.trained.items():
            copy = whole_copy(self.config, self.inputs.checkpoints, role, self.rank, self.device)
            self.resharder.reshard(trained.optimizer.modules.values(), copy)
            with self.checkpoints.joint_failure():
                if self.rank == 0:
                    paths, specs = self.inputs.checkpoints.paths, self.inputs.checkpoints.specs
                    weights = dict(copy.named_parameters())
                    out = self.run_dir / "export" / role
                    export_checkpoint(weights, specs[role], trained.scalar_head, paths[role], out)
