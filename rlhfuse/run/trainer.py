"""PPO with both fusions: one iteration after another, every rank through the blocks of its own tasks.

move: actor and critic into their generation and inference layouts -> generate, score (inter-stage fusion, paper
section 4) -> host: rewards and advantages over the whole batch -> train: mini-batches through the fused pipeline
(section 5). What follows, books, checkpoint and evaluation, is the loop's (run_loop.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store
from torch.nn import Module

from rlhfuse.base.clock import Clock
from rlhfuse.base.sample_ids import prompt_groups
from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.data.prompts import Prompt
from rlhfuse.decisions.weight_holders import WeightHolders
from rlhfuse.fusion.inter.inference import Scorer
from rlhfuse.fusion.inter.inter_stage import InterStage
from rlhfuse.fusion.inter.request import Request
from rlhfuse.fusion.intra.training_step import MinibatchResult, TrainingStep
from rlhfuse.gen.engine import Engine
from rlhfuse.monitor.pace import PacedClock
from rlhfuse.parallel.background import Background
from rlhfuse.parallel.device import Device
from rlhfuse.parallel.learning_rate import learning_rate
from rlhfuse.parallel.memory import PhaseMeter
from rlhfuse.parallel.reshard import Resharder, Route
from rlhfuse.ppo.adaptive import KLController, RunningMoments
from rlhfuse.ppo.advantage import add_advantages
from rlhfuse.ppo.rollout import RolloutBatch, given
from rlhfuse.ppo.token_rewards import add_token_rewards, combine_rewards, sample_kl
from rlhfuse.run.evaluation import Evaluation, Evaluator
from rlhfuse.run.iteration_metrics import IterationStats
from rlhfuse.run.iteration_recorder import IterationRecorder, IterationResult
from rlhfuse.run.peak_rate import peak_flops
from rlhfuse.run.preflight import RunInputs
from rlhfuse.run.rank_models import DTYPES, build_models, engine_options, requests_of, sampling_params
from rlhfuse.run.sampling.function_reward import AS_DRAWN, FunctionRewarder
from rlhfuse.run.sampling.group_sampler import GroupSampler
from rlhfuse.run.sampling.tool_caller import ToolCaller
from rlhfuse.run.threshold_controller import ThresholdController
from rlhfuse.tasks.balance import split_minibatches
from rlhfuse.tasks.iteration import Block
from rlhfuse.tasks.role import POLICY, Role
from rlhfuse.tasks.task import DESTINATIONS, Kind, ModelTask


class Trainer:
    """Everything of a run's iterations on one rank."""

    def __init__(
        self,
        inputs: RunInputs,
        rank: int,
        device: Device,
        store: Store,
        progress: Callable[[str], None],
        folder: Path,
    ) -> None:
        """`progress` is told of every piece of work; `folder`: the run's, for journals of tools."""
        config, plan = inputs.config, inputs.plan
        self.config, self.inputs, self.plan = config, inputs, plan
        self.rank, self.device, self.progress = rank, device, progress
        self.memory = PhaseMeter(device, config.trainer.return_memory)
        self.models = build_models(config, plan.tasks, inputs.models, plan.ranks, rank, device, progress)
        progress("building the engine: kernels that are not cached are compiled")
        self.clock = Clock(rank)
        if plan.pace:
            prices = plan.pace.prices(max(1, len(config.scorers())))
            self.clock = PacedClock(rank, prices, config.trainer.pace_stretch, plan.paced)
        bucket_bytes = config.fusion.bucket_mib << 20
        self.resharder = Resharder(device, bucket_bytes)
        self.mover = Resharder(device, bucket_bytes, self.models.move_group)  # beneath generation
        self.engine = self._build_engine()
        self.scorer = Scorer(
            self.models.frozen,
            vocab=inputs.models.in_use(POLICY).vocab,
            temperature=config.rollout.temperature,
            device=device.torch_device,
            clock=self.clock,
        )
        self.training = TrainingStep(
            rank,
            plan.ranks,
            plan.batch.cut,
            plan.schedules,
            plan.programs,
            self.models.trained,
            self.models.channels,
            config.rollout.temperature,
            progress,
            self.clock,
        )
        self.threshold = ThresholdController(config, plan, device)
        self.peak_flops = None  # of sleep
        if not isinstance(self.clock, PacedClock):
            self.peak_flops = peak_flops(DTYPES[config.trainer.dtype], device)
        self.caller = self._start_caller(folder)
        self.rewarder = self._start_rewarder()
        self.kl = KLController(config.algorithm.kl_coef, config.algorithm.kl_target, config.algorithm.kl_horizon)
        self.scores = RunningMoments()
        self.recorder = IterationRecorder(inputs, self.threshold, self.peak_flops, self.clock)
        self.inter_stage = InterStage(
            place=self.models.place,
            engine=self.engine,
            scorer=self.scorer,
            store=store,
            rewarder=self.rewarder,
            tools=self.caller,
            timeout_seconds=config.trainer.hang_seconds,
            progress=progress,
            bucket_bytes=config.fusion.bucket_mib << 20,
            early_models=plan.limits.early_models,
            generation_done=self._release_generation,
            clock=self.clock,
        )
        self.sampler = GroupSampler(
            inputs, self.inter_stage, self.rewarder, self.caller, self._requests, self._prepare_round
        )
        self.evaluator = Evaluator(inputs, self.inter_stage, self.models, self.rewarder, self.caller)
        moves = (task for task in plan.iteration.tasks if isinstance(task, ModelTask) and task.kind == "move")
        self.moves = {task.role: task.name for task in moves}
        self.executors: Mapping[Kind, Callable[[Block, IterationResult], None]] = {
            "move": self._run_moves,
            "generate": self._run_samples,
            "host": self._run_advantages,
            "train": self._run_training,
        }
        blocks = plan.iteration.program(rank)
        self.program = [block for block in blocks if block.kind in self.executors and not block.on_turn]

    def _build_engine(self) -> Engine:
        place = self.models.place
        return Engine(
            self.inputs.models.in_use(POLICY),
            None,  # they come with the first move
            engine_options(self.config, self.plan.batch.instances, self.plan.keeps_generation),
            device=self.device.torch_device,
            dtype=DTYPES[self.config.trainer.dtype],
            tp_group=place.instance_group if place.decoders.size > 1 else None,
            detokenize=partial(self.inputs.tokenizer.decode, skip_special_tokens=False, **AS_DRAWN),
            clock=self.clock,
        )

    def _release_generation(self) -> None:
        """This rank decodes no more in this iteration: the actor's copy goes before others come in, unless it stays."""
        if not self.plan.keeps_generation:
            self.engine.release_weights()
            self.models.generation.release()
        self.memory.switch("inference")

    def _start_rewarder(self) -> FunctionRewarder | None:
        """The first rank of each instance has the processes that call the reward function."""
        if not (self.config.reward.function and self.models.place.decoders.is_leader):
            return None
        return FunctionRewarder(self.inputs, self.progress, self.caller)

    def _start_caller(self, folder: Path) -> ToolCaller | None:
        """Every rank knows what turns ask for; the first one of each instance has the processes that call tools."""
        if not (tools := self.inputs.tools):
            return None
        resumed = self.inputs.resume.iteration if self.inputs.resume else None
        return ToolCaller(self.config, tools, self.rank, folder, self.models.place.decoders.is_leader, resumed)

    def calls_under_way(self) -> int:
        """Calls of reward function and tools that have not ended, in processes of this rank."""
        return sum(one.under_way() for one in (self.rewarder, self.caller) if one)

    def iterate(self, iteration: int) -> IterationResult:
        """One PPO iteration up to its books: the blocks of this rank's tasks, in order; a collective."""
        done = IterationResult(iteration, self.recorder.begin(), self.threshold.threshold)
        for block in self.program:
            self.progress(f"iteration {iteration}: {block}")
            self.executors[block.kind](block, done)
        self._steer(iteration, done.batch)
        tools = self.caller.take_stats() if self.caller else None
        peaks = {"base": self.memory.base_bytes, **self.memory.take()}
        done.stats = IterationStats.of(done.minibatches, self.clock, peaks, tools)
        return done

    def _run_moves(self, block: Block, done: IterationResult) -> None:
        with self.clock.work(block.name, iteration=done.number):
            self._reshard()

    def _run_samples(self, block: Block, done: IterationResult) -> None:
        self._begin_moves(block)
        try:
            done.report, done.filtered = self.sampler.run(done.number, done.threshold, self.threshold.limits)
        finally:  # weights change from here on, or the groups end
            for model in self.models.frozen.values():
                model.offloaded.await_values()
        self.engine.learn(piece for rollout in done.report.rollouts for piece in rollout.pieces())

    def _run_advantages(self, block: Block, done: IterationResult) -> None:
        with self.clock.work(block.name, iteration=done.number):
            batch = RolloutBatch.from_rollouts(done.report.rollouts)
            batch = combine_rewards(batch, done.report.function_scores, self.config.reward)
            batch.check_finite()
            done.algorithm = algorithm = self._effective_config(batch)
            if algorithm.mask_truncated_completions:
                batch = batch.counting(~batch.truncated)
            batch = add_token_rewards(batch, algorithm, self.config.rollout.max_response_tokens)
            done.batch = add_advantages(batch, algorithm, prompt_groups(batch.sample_ids))

    def _run_training(self, block: Block, done: IterationResult) -> None:
        with self.clock.work(block.name, span=False):  # its actions have their own spans
            done.minibatches = self._train(done.number, done.batch, done.algorithm)

    def evaluate(self, iteration: int) -> Evaluation:
        """Held-out prompts, by the actor as it is after `iteration`; -1: before the first. A collective."""
        work = self.clock.begin()
        when = f"after iteration {iteration}" if iteration >= 0 else "before training"
        self.progress(f"evaluation {when}: {self.moves[POLICY]}")
        self._reshard()
        evaluation = self.evaluator.run(iteration, self.threshold.threshold, self.threshold.limits)
        self.memory.take()  # the peaks that are shown are training's
        self.recorder.skip(work.seconds)
        return replace(evaluation, metrics=evaluation.metrics | {"timing_s/eval": work.seconds})

    def _requests(self, iteration: int, prompts: Sequence[Prompt], first: int) -> list[Request]:
        """Samples of prompts at the places from `first` on, the same on every rank."""
        copies, params = self.config.rollout.samples_per_prompt, sampling_params(self.config)
        return requests_of(iteration, prompts, copies, params, first)

    def _effective_config(self, batch: RolloutBatch) -> AlgorithmConfig:
        """The algorithm's settings of this iteration: the KL's weight and the scale of scores follow the run."""
        algorithm = self.config.algorithm.model_copy(update={"kl_coef": self.kl.coef})
        if not algorithm.scale_scores:
            return algorithm
        self.scores = self.scores.after(given(batch.intact.scores))
        return algorithm.model_copy(update={"score_scale": algorithm.score_scale / self.scores.std})

    def _steer(self, iteration: int, batch: RolloutBatch) -> None:
        """The KL's weight towards its target, by the iteration's samples."""
        if batch.ref_logprobs is not None and iteration >= self.config.held_iterations(POLICY):
            kl = sample_kl(batch.intact)
            self.kl = self.kl.after(float(kl.mean()), len(kl))

    def carried(self) -> dict[str, Any]:
        """What the algorithm carries on from iteration to iteration, as JSON values."""
        return {"kl_coef": self.kl.coef, "scores": asdict(self.scores), "accepted_share": self.sampler.share}

    def carry_on(self, carried: Mapping[str, Any], prompts_drawn: int) -> None:
        """Inverse of `carried`, as far as the settings let it move, by a run that has drawn so many prompts."""
        self.sampler.drawn, self.sampler.share = prompts_drawn, carried.get("accepted_share", 1.0)
        if self.kl.target:
            self.kl = replace(self.kl, coef=carried["kl_coef"])
        if self.config.algorithm.scale_scores:
            self.scores = RunningMoments(**carried["scores"])

    def _prepare_round(self) -> None:
        """The engine again ready in an iteration."""
        self.progress(f"a further round of groups: {self.moves[POLICY]}")
        if self.plan.keeps_generation:
            self.memory.switch("generation")
            self.engine.resume()
        else:
            self._reshard()

    def _reshard(self) -> None:
        """The policy to generation."""
        for model in self.models.trained.values():
            model.optimizer.release_gradients()
        self.memory.switch("moves")
        if offload := self.plan.offload_phase:
            self.models.offload_optimizers(free=offload == "moves")
        generation = self.models.generation
        generation.allocate()
        with self.clock.work(price=("move", POLICY)):
            self.resharder.reshard(*self._sides(POLICY, generation.module))
        if offload:
            self.models.offload_optimizers(free=True)
        self.engine.load_weights(dict(generation.module.named_parameters()))
        self.memory.switch("generation")
        held = self.models.held_bytes(with_host=not self.device.is_cuda) + self.engine.cache_bytes
        self.memory.note_base(held)
        self.engine.resume()

    def _sides(self, role: Role, destination: Module) -> tuple[list[Module], Module, WeightHolders, WeightHolders]:
        """What `Resharder` takes."""
        holders, chunks = self.models.holders, [*self.models.trained[role].optimizer.modules.values()]
        return chunks, destination, holders[f"{role}_train"], holders[DESTINATIONS[role]]

    def _begin_moves(self, block: Block) -> None:
        """Models that train and score go to their copies in host memory, one after the other, while samples are
        generated. Whoever loads a copy waits for it, and the block's end for all."""
        routes: list[tuple[Role, Route]] = []
        for task in (task for task in block.tasks if isinstance(task, ModelTask) and task.kind == "move"):
            offloaded = self.models.frozen[task.role].offloaded
            offloaded.expose()
            routes.append((task.role, self.mover.route(*self._sides(task.role, offloaded.module), lasting=True)))
            offloaded.release()
        if not routes:
            return

        def move() -> None:
            for role, route in routes:
                with self.clock.work(self.moves[role], price=("move", role)):
                    self.mover.move(route)

        work = Background(move, "weight-mover", self.device.torch_device, self.clock)
        for role, _ in routes:
            self.models.frozen[role].offloaded.arrival = work

    def _train(self, iteration: int, batch: RolloutBatch, algorithm: AlgorithmConfig) -> list[MinibatchResult]:
        self.memory.switch("training")
        self.device.empty_cache()
        for model in self.models.trained.values():
            model.optimizer.states.come_back()  # which the optimizers' steps wait for
        lr = {str(role): self.learning_rate(role, iteration) for role in self.models.trained}
        results: list[MinibatchResult] = []
        trains = next(block for block in self.program if block.kind == "train")
        seed, count = self.config.trainer.seed, algorithm.minibatches
        for epoch in range(algorithm.epochs):
            for indices in split_minibatches(len(batch), count, seed, iteration, epoch):
                self.progress(f"iteration {iteration}: {trains} mini-batch {len(results)}")
                results.append(self.training.run(batch.select(indices), lr, algorithm))
        if self.plan.offload_phase:
            self.models.offload_optimizers(free=False)
        return results

    def learning_rate(self, role: str, iteration: int) -> float | None:
        """The learning rate of a model, None while it is held still."""
        held = self.config.held_iterations(role)
        return learning_rate(getattr(self.config, role).optim, iteration - held) if iteration >= held else None
