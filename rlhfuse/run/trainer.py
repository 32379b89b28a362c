"""PPO with both fusions: one iteration after another, the same program on every rank.

actor and critic into their generation and inference layouts -> generate and score (inter-stage fusion, paper
section 4) -> rewards and advantages over the whole batch -> mini-batches through the fused pipeline (section 5)
-> lengths give the next R_t -> held-out prompts, where it is their turn -> metrics
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from rlhfuse.base.clock import wall_seconds
from rlhfuse.base.errors import InputError, JointError, RewardError, Stopped
from rlhfuse.config.role import SCORING_ORDER, Role
from rlhfuse.config.settings import AlgorithmConfig
from rlhfuse.data.prompts import Prompt
from rlhfuse.data.sampler import PromptSampler, prompt_groups, sample_id
from rlhfuse.decisions.balance import split_minibatches
from rlhfuse.fusion.inter.generation import Request
from rlhfuse.fusion.inter.inference import Scorer
from rlhfuse.fusion.inter.inter_stage import InterStage
from rlhfuse.fusion.intra.training_step import MinibatchResult, TrainingStep
from rlhfuse.gen.engine import Engine
from rlhfuse.models.hf import hf_tensors
from rlhfuse.models.hf_folder import exhaust, export_checkpoint
from rlhfuse.monitor.heartbeat import Waiting
from rlhfuse.monitor.metrics import plain_metrics
from rlhfuse.monitor.watchdog import SAVE_SECONDS, Watchdog
from rlhfuse.parallel.collectives import any_rank, from_rank_0, raise_on_all_ranks
from rlhfuse.parallel.device import Device
from rlhfuse.parallel.learning_rate import learning_rate
from rlhfuse.parallel.memory import PhaseMeter, process_line
from rlhfuse.parallel.optimizer_state import check_exportable, export_state, import_state
from rlhfuse.parallel.reshard import Resharder
from rlhfuse.parallel.whole_weights import WholeWeights
from rlhfuse.planning.run_plan import RunPlan
from rlhfuse.ppo.adaptive import KLController, RunningMoments
from rlhfuse.ppo.advantage import add_advantages
from rlhfuse.ppo.rollout import RolloutBatch, given
from rlhfuse.ppo.token_rewards import add_token_rewards, combine_rewards, sample_kl
from rlhfuse.run.checkpoint.checkpoint import Checkpoint, RunState, folder_of, is_own, metrics_kept
from rlhfuse.run.checkpoint.writer import CheckpointWriter, mark_finished, rewind
from rlhfuse.run.evaluation import BestScore, Evaluation, Evaluator
from rlhfuse.run.function_reward import FunctionRewarder
from rlhfuse.run.iteration_metrics import PhaseTimer
from rlhfuse.run.iteration_recorder import IterationRecord, IterationRecorder, IterationResult
from rlhfuse.run.peak_rate import peak_flops, peak_line
from rlhfuse.run.preflight import RunInputs, own_tokenizer
from rlhfuse.run.rank_models import DTYPES, build_models, engine_options, sampling_params
from rlhfuse.run.run_directory import RunDirectory
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
        store: Store,
        watchdog: Watchdog,
        directory: RunDirectory,
    ) -> None:
        config = inputs.config
        self.config, self.inputs, self.plan = config, inputs, plan
        self.rank, self.device, self.watchdog = rank, device, watchdog
        self.directory, self.run_dir = directory, directory.path
        self.memory = PhaseMeter(device, config.trainer.return_memory)
        self.models = build_models(config, inputs.models, plan.ranks, rank, device, watchdog.progress)
        watchdog.progress("building the engine: kernels that are not cached are compiled")
        self.resharder = Resharder(device, bucket_bytes=config.fusion.bucket_mib << 20)
        self.engine = self._build_engine()
        self.scorer = Scorer(
            *(self.models.frozen.get(role) for role in SCORING_ORDER),
            vocab=inputs.models.in_use(Role.ACTOR).vocab,
            temperature=config.rollout.temperature,
            device=device.torch_device,
        )
        self.training = TrainingStep(
            rank,
            plan.ranks,
            plan.schedule,
            plan.programs,
            self.models.trained,
            self.models.channels,
            config.rollout.temperature,
            watchdog.progress,
        )
        self.threshold = ThresholdController(config, plan, device)
        self.peak_flops = peak_flops(config.trainer.peak_tflops, DTYPES[config.trainer.dtype], device)
        self.sampler = PromptSampler(len(inputs.prompts), config.trainer.seed)
        self.rewarder = self._start_rewarder()
        self.kl = KLController(config.algorithm.kl_coef, config.algorithm.kl_target, config.algorithm.kl_horizon)
        self.scores = RunningMoments()
        placement = self.models.placement
        self.recorder = IterationRecorder(inputs, plan.report, placement, rank, self.threshold, self.peak_flops)
        self.checkpoints = CheckpointWriter(
            self.run_dir,
            rank,
            inputs.world_size,
            inputs.facts,
            config.trainer.keep_checkpoints,
            config.trainer.hang_seconds,
            watchdog.progress,
        )
        self.inter_stage = InterStage(
            rank=rank,
            placement=placement,
            engine=self.engine,
            scorer=self.scorer,
            store=store,
            rewarder=self.rewarder,
            instance_group=self.models.generation_tp,
            worker_group=self.models.worker_tp,
            timeout_seconds=config.trainer.hang_seconds,
            progress=watchdog.progress,
            bucket_bytes=config.fusion.bucket_mib << 20,
            early_models=plan.report.generation.limits.early_models,
            generation_done=self._release_generation,
        )
        self.evaluator = Evaluator(inputs, self.inter_stage, self.models, self.rewarder)
        self.best: BestScore | None = None  # whose checkpoint is kept
        self.log: RunLog | None = None  # rank 0's

    def _build_engine(self) -> Engine:
        return Engine(
            self.inputs.models.in_use(Role.ACTOR),
            None,  # they come with the first move
            engine_options(self.config, self.plan.report.batch.instances, self.plan.report.memory.keeps_generation),
            device=self.device.torch_device,
            dtype=DTYPES[self.config.trainer.dtype],
            tp_group=self.models.generation_tp if dist.get_world_size(self.models.generation_tp) > 1 else None,
            detokenize=partial(self.inputs.tokenizer.decode, skip_special_tokens=False),
        )

    def _release_generation(self) -> None:
        """This rank decodes no more in this iteration: the actor's copy goes before others come in, unless it stays."""
        if not self.plan.report.memory.keeps_generation:
            self.engine.release_weights()
            self.models.generation.release()
        self.memory.switch("inference")

    def _start_rewarder(self) -> FunctionRewarder | None:
        """The first rank of each instance has the processes that call the reward function."""
        placement = self.models.placement
        is_leader = placement.instances[placement.instance_of(self.rank)][0] == self.rank
        if not (self.config.reward.function and is_leader):
            return None
        return FunctionRewarder(self.inputs, self.watchdog.progress)

    # the loop -------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Run the iterations that are not done yet, then export. Raises JointError where a file cannot be written.

        Raises Stopped where a signal asked for an end: the iteration under way is done first, and saved.
        """
        self.watchdog.go_on = self.directory.go_on(self.config.trainer)
        self.watchdog.is_saving = self.checkpoints.is_saving
        first = self._restore()
        # What is there now stays: a full collection that walks it takes a third of a second, in any phase.
        gc.collect()
        gc.freeze()
        try:
            self._fit(first)
        except (FloatingPointError, RewardError) as error:
            raise type(error)(f"{error}; {self.checkpoints.last_good(SAVE_SECONDS)}") from error
        finally:
            gc.unfreeze()

    def _fit(self, first: int) -> None:
        row = self.inputs.resume.manifest.state.position.get("row") if self.inputs.resume else None
        with self.checkpoints.joint_failure():
            self.log = self._start_log(first, has_row=row is not None) if self.rank == 0 else None
        if self.config.evaluates_first and not self.inputs.resume:
            found = self.evaluate(-1)
            self._is_best(0, found)
            with self.checkpoints.joint_failure():
                if self.log:
                    self.log.write(IterationRecord({"iteration": -1, **found.metrics}, [], found.samples))
        stopped, total = False, self.config.trainer.iterations
        if row is not None:
            record, here = IterationRecord(dict(row), [], []), is_own(self.inputs.resume, self.run_dir)
            stopped = self._conclude(first, record, saved=here)
        done, seconds = first, 0.0
        while done < total and not stopped:
            took = f", the one before took {seconds:.0f} s" if seconds else ""
            self.watchdog.finishing = f"iteration {done} of {total} is finished and saved first{took}"
            begin = time.monotonic()
            stopped = self._conclude(done + 1, self._checked_iteration(done))
            done, seconds = done + 1, time.monotonic() - begin
        self.watchdog.finishing = ""
        broken = None if stopped else self._export()
        self.checkpoints.finish()
        with self.checkpoints.joint_failure():
            for opened in (self.log, self.rewarder):
                if opened:
                    opened.close()
            if self.log and not stopped:
                mark_finished(self.run_dir, total)
        if broken:
            raise broken
        if stopped:
            saved = f"saved in {self._folder(done)}" if self._can_save() else "not saved: sgd has no checkpoints"
            raise Stopped(f"stopped: {done} of {total} iterations are done, {saved}; {self.watchdog.go_on}")

    def _checked_iteration(self, iteration: int) -> IterationRecord:
        try:
            return self.iterate(iteration)
        except FloatingPointError as error:
            raise type(error)(f"iteration {iteration}: {error}") from error

    def _conclude(self, done: int, record: IterationRecord, saved: bool = False) -> bool:
        """Write an iteration down, save and evaluate where it is their turn; whether the run is to stop. A collective.

        Line and checkpoint come before the evaluation, which may fail, and learn of it afterwards. `saved`: there is a
        checkpoint already.
        """
        log, evaluates = self.log, self.config.evaluates_after(done)
        stop = any_rank(self.watchdog.stop_asked)
        due, position = not saved and (self._save_due(done) or (stop and self._can_save())), {}
        with self.checkpoints.joint_failure():
            if log:
                self.directory.check()
                before = log.position() if due and evaluates else {}
                log.write(record)
                self.threshold.save_costs(self.run_dir / "costs.json")
                position = log.position() if due else {}
                if evaluates and due:
                    position |= {"metrics_bytes": before["metrics_bytes"], "row": plain_metrics(record.metrics)}
        if due:
            self.save(done, position)
        if not evaluates or stop:
            return stop
        try:
            found = self.evaluate(done - 1)
        except (FloatingPointError, RewardError) as error:
            without = "trainer.eval_every=0" + (" trainer.keep_best=false" if self.config.trainer.keep_best else "")
            where = f"the evaluation after iteration {done - 1}"
            raise type(error)(f"{where}: {error}; {without} goes on without it") from error
        best, saved = self._is_best(done, found), saved or due
        stop = any_rank(self.watchdog.stop_asked)
        with self.checkpoints.joint_failure():
            if log:
                log.complete(record, found)
                position = log.position()
                if saved:
                    self.checkpoints.complete(done, self._position(done, position))
        if not saved and (best or (stop and self._can_save())):
            self.save(done, position)
        return stop

    def _start_log(self, first: int, has_row: bool) -> RunLog:
        """Log a run that goes on with iteration `first`; what it is going to write again is removed.

        `has_row`: that begins with the line of the iteration before.
        """
        self.directory.check()
        if stale := rewind(self.run_dir, first):
            print(f"removed from {self.run_dir / 'checkpoints'}: {', '.join(stale)}", flush=True)
        kept, samples = metrics_kept(self.inputs.resume, self.run_dir), 0
        if self.inputs.resume and is_own(self.inputs.resume, self.run_dir):
            samples = self.inputs.resume.manifest.state.position.get("samples_bytes")
        log = RunLog(self.run_dir, self.config, self.plan.report, first - has_row, kept, samples)
        lines = peak_line(self.peak_flops, self.device), *self.engine.lines, self.models.layers.line()
        lines = *lines, process_line(self.device, self.plan.report.memory.process_bytes)
        print("\n".join(line for line in lines if line), flush=True)
        return log

    def iterate(self, iteration: int) -> IterationRecord:
        """One PPO iteration; a collective."""
        begin = self.recorder.begin()
        timer = PhaseTimer(self.rank, iteration)
        self.watchdog.progress(f"iteration {iteration}: moving weights")
        with timer.phase("reshard"):
            self._reshard()
        threshold = self.threshold.threshold
        prompts = self._draw(iteration)
        if self.rewarder:
            self.rewarder.begin(prompts, self.config.rollout.samples_per_prompt)
        requests = self._requests(iteration, prompts)
        report = self.inter_stage.run(iteration, requests, threshold, self.threshold.limits)
        timer.add_generation(report)
        self.engine.learn((rollout.prompt_tokens, rollout.response_tokens) for rollout in report.rollouts)
        if news := self.engine.news():
            print(f"rank {self.rank}: {news}", flush=True)
        with timer.phase("adv"):
            batch = RolloutBatch.from_rollouts(report.rollouts)
            batch = combine_rewards(batch, report.function_scores, self.config.reward)
            batch.check_finite()
            algorithm = self._effective_config(batch)
            batch = add_token_rewards(batch, algorithm, self.config.rollout.max_response_tokens)
            batch = add_advantages(batch, algorithm, prompt_groups(batch.sample_ids))
        with timer.phase("train", span=False):  # its actions have their own spans
            minibatches = self._train(iteration, batch, algorithm)
        timer.add_actions(minibatches)
        self.watchdog.progress(f"iteration {iteration}: recording metrics")
        if batch.ref_logprobs is not None and iteration >= self.config.held_iterations:
            self.kl = self.kl.after(float(sample_kl(batch).mean()), len(batch))
        peaks = {"base": self.memory.base_bytes, **self.memory.take()}
        return self.recorder.finish(
            IterationResult(iteration, begin, threshold, report, batch, algorithm, minibatches, timer, peaks)
        )

    def evaluate(self, iteration: int) -> Evaluation:
        """Held-out prompts, by the actor as it is after `iteration`; -1: before the first. A collective."""
        begin = wall_seconds()
        when = f"after iteration {iteration}" if iteration >= 0 else "before training"
        self.watchdog.progress(f"evaluation {when}: moving weights")
        self._reshard(for_training=False)
        found = self.evaluator.run(iteration, self.threshold.threshold, self.threshold.limits)
        self.memory.take()  # the peaks that are shown are training's
        seconds = wall_seconds() - begin
        self.recorder.skip(seconds)
        return replace(found, metrics=found.metrics | {"timing_s/eval": seconds})

    def _is_best(self, done: int, found: Evaluation) -> bool:
        """Whether the checkpoint of now is to be kept instead of the best so far."""
        worse = self.best is not None and found.score <= self.best.score
        if not self.config.trainer.keep_best or worse or not math.isfinite(found.score):
            return False
        self.best = BestScore(done, found.score, self.evaluator.digest)
        return True

    def _draw(self, iteration: int) -> list[Prompt]:
        """The prompts of an iteration, in the order of their places."""
        drawn = self.sampler.prompts_of(iteration, self.config.rollout.prompts_per_iteration)
        return [self.inputs.prompts[index] for index in drawn]

    def _requests(self, iteration: int, prompts: Sequence[Prompt]) -> list[Request]:
        """The whole batch's samples, the same on every rank."""
        params = sampling_params(self.config)
        return [
            Request(sample_id(iteration, place, copy), tuple(prompt.tokens), params)
            for place, prompt in enumerate(prompts)
            for copy in range(self.config.rollout.samples_per_prompt)
        ]

    def _effective_config(self, batch: RolloutBatch) -> AlgorithmConfig:
        """The algorithm's settings of this iteration: the KL's weight and the scale of scores follow the run."""
        algorithm = self.config.algorithm.model_copy(update={"kl_coef": self.kl.coef})
        if not algorithm.scale_scores:
            return algorithm
        self.scores = self.scores.after(given(batch.scores))
        return algorithm.model_copy(update={"score_scale": algorithm.score_scale / self.scores.std})

    def _reshard(self, for_training: bool = True) -> None:
        """Actor into the generation layout; for training a critic into the inference layout and on to host memory."""
        for model in self.models.trained.values():
            model.optimizer.release_gradients()
        self.memory.switch("moves")
        if offload := self.plan.report.memory.offload:
            self.models.offload_optimizers(free=offload.first_phase == "moves")
        generation = self.models.generation
        generation.allocate()
        self.resharder.reshard(self.models.actor.optimizer.modules.values(), generation.module)
        if for_training and (critic := self.models.trained.get(Role.CRITIC)):
            offloaded = self.models.frozen[Role.CRITIC].offloaded
            offloaded.allocate()
            self.resharder.reshard(critic.optimizer.modules.values(), offloaded.module)
            offloaded.offload()
        if offload:
            self.models.offload_optimizers(free=True)
        self.engine.load_weights(dict(generation.module.named_parameters()))
        self.memory.switch("generation")
        held = self.models.held_bytes(with_host=not self.device.is_cuda) + self.engine.cache_bytes
        self.memory.note_base(held)
        self.engine.resume()

    def _train(self, iteration: int, batch: RolloutBatch, algorithm: AlgorithmConfig) -> list[MinibatchResult]:
        self.memory.switch("training")
        self.device.empty_cache()
        self.models.load_optimizers()
        lr = {str(role): self._lr(role, iteration) for role in self.models.trained}
        results, microbatches = [], self.plan.report.batch.microbatches_of
        seed, count = self.config.trainer.seed, algorithm.minibatches
        for epoch in range(algorithm.epochs):
            for indices in split_minibatches(len(batch), count, seed, iteration, epoch):
                self.watchdog.progress(f"iteration {iteration}: training mini-batch {len(results)}")
                results.append(self.training.run(batch.select(indices), microbatches, lr, algorithm))
        if self.plan.report.memory.offload:
            self.models.offload_optimizers(free=False)
        return results

    def _lr(self, role: str, iteration: int) -> float | None:
        """The learning rate of a model, None while it is held still."""
        held = self.config.held_iterations if role == Role.ACTOR else 0
        return learning_rate(getattr(self.config, role).optim, iteration - held) if iteration >= held else None

    # checkpoints ----------------------------------------------------------------------------------------------

    def _save_due(self, done: int) -> bool:
        """Every `save_every` iterations, and after the last, so that a finished run can be extended."""
        every = self.config.trainer.save_every
        return every > 0 and (done % every == 0 or done == self.config.trainer.iterations)

    def _can_save(self) -> bool:
        with suppress(InputError):
            for model in self.models.trained.values():
                check_exportable(model.optimizer)
            return True
        return False

    def save(self, done: int, position: Mapping[str, Any]) -> None:
        """Begin to write checkpoints/iteration-`done`; a collective. Rank 0 gives the `position` of its logs."""
        self.watchdog.progress(f"saving checkpoint iteration-{done}")
        carried = {"kl_coef": self.kl.coef, "scores": asdict(self.scores)}
        state = RunState(self.threshold.state(), carried, self._position(done, position))
        owned = {role: export_state(model.optimizer) for role, model in self.models.trained.items()}
        self.checkpoints.start(done, state, owned, self.best.done if self.best else None)

    def _position(self, done: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint says of where the run is, beside the position of its `logs`."""
        return {
            **logs,
            "prompts_drawn": done * self.config.rollout.prompts_per_iteration,
            "learning_rate": {role: self._lr(role, done - 1) or 0.0 for role in self.models.trained},
            "best": asdict(self.best) if self.best else None,
        }

    def _restore(self) -> int:
        """Take the checkpoint to resume from in, if any; returns the first iteration to run."""
        if self.config.trainer.save_every or self.inputs.resume:
            for model in self.models.trained.values():
                check_exportable(model.optimizer)
        if not (resume := self.inputs.resume):
            return 0
        self._load(resume)
        state, moved = resume.manifest.state, self.inputs.facts.layout_diff(resume.manifest.facts)
        if self.kl.target:
            self.kl = replace(self.kl, coef=state.algorithm["kl_coef"])
        if self.config.algorithm.scale_scores:
            self.scores = RunningMoments(**state.algorithm["scores"])
        self.threshold.restore(dict(state.threshold), str(resume.folder), lengths_alone=bool(moved))
        self.best = self._best_of(state)
        return resume.iteration

    def _load(self, checkpoint: Checkpoint) -> None:
        """Weights and optimizer states of the models that train."""
        self.watchdog.progress(f"loading {checkpoint.folder}")
        reader = checkpoint.open_reader()  # no longer than this: it holds the files' space

        def read(role: str, name: str, *which: Any) -> Tensor:
            self.watchdog.progress(f"loading {checkpoint.folder}: {name} of the {role}")
            return reader.read(role, name, *which)

        for role, model in self.models.trained.items():
            import_state(model.optimizer, partial(read, role), partial(reader.step, role))

    def _best_of(self, state: RunState) -> BestScore | None:
        """The best so far, if its checkpoint is still there and scores mean what they meant; a collective."""
        best = BestScore(**kept) if (kept := state.position.get("best")) else None
        there = best and best.digest == self.evaluator.digest and (not best.done or self._folder(best.done).is_dir())
        return best if from_rank_0(bool(there)) and self.config.trainer.keep_best else None

    def _folder(self, done: int) -> Path:
        return folder_of(self.run_dir) / f"iteration-{done}"

    def _export(self) -> JointError | None:
        """What the run leaves at its end; a collective. The best is read back from its checkpoint.

        Returns why that cannot be, where its files are broken: the rest of the run is whole.
        """
        self.checkpoints.finish()  # first: an export may be cut short
        if not self.config.trainer.export or not self.config.trainer.iterations:
            return None
        folder = self.run_dir / "export"
        self.export(folder)
        if self.best and self.best.done:
            try:
                with raise_on_all_ranks():
                    best = Checkpoint.open(self._folder(self.best.done))
            except JointError as error:
                return JointError(f"{error}; {folder} is whole, {folder / 'best'} was not written")
            self._load(best)
            self.export(folder / "best")
        elif self.rank == 0:
            with suppress(FileNotFoundError):  # an earlier start's, by other held-out prompts or none
                os.replace(folder / "best", folder / "best-before")
            if self.best:
                print(f"no evaluation was better than that before training: there is no {folder / 'best'}", flush=True)
        return None

    def export(self, folder: Path) -> None:
        """Write the trained models in Hugging Face layout, each in a folder of its own; a collective."""
        self.watchdog.progress("exporting models")
        for role in self.config.trained():
            path, spec, trained = (
                self.inputs.models.paths[role],
                self.inputs.models.specs[role],
                self.models.trained[role],
            )
            weights, head = WholeWeights(trained.optimizer.modules.values()), trained.scalar_head
            tensors = hf_tensors(weights, spec, head)  # all ranks make them, rank 0 alone with values
            with self.checkpoints.joint_failure():
                if self.rank == 0:
                    own = own_tokenizer(self.config)
                    export_checkpoint(tensors, head, path, folder / role, own, self.watchdog.progress)
                else:
                    self.watchdog.progress(Waiting(f"waiting for the export of the {role}"))
                    exhaust(tensors)
