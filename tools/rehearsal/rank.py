"""One rank of a run, phase by phase: the run's own trainer, whose weights, prompts and samples are made up.

The samples are as long as they can become. Of generation the last steps run, of inference two packs, of training two
mini-batches: what else there is in a real iteration does the same again.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from rehearsal.device import install
from rehearsal.memory import Meter
from rehearsal.phases import PhaseLog, RankRehearsal
from rehearsal.stages import WHOLE
from rehearsal.stand_ins.files import EmptyFiles
from rehearsal.stand_ins.iterations import MINIBATCHES, RehearsedTrainer
from rehearsal.stand_ins.microbatches import SampledStage
from rehearsal.stand_ins.others import PACKS
from rehearsal.stand_ins.samples import RESPONSE_STEPS, Samples
from rehearsal.tensors import CUDA, FakeCuda
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhfuse.data.prompts import Prompt, PromptSet
from rlhfuse.parallel.device import Device
from rlhfuse.planning.candidate import Candidate
from rlhfuse.planning.plan import Plan
from rlhfuse.run import rank_models
from rlhfuse.run.checkpoint.checkpoint import Checkpoint, folder_of
from rlhfuse.run.checkpoint.compatibility import RunCompatibility
from rlhfuse.run.preflight import RunInputs
from rlhfuse.run.rank_models import ModelFolders
from rlhfuse.run.run_directory import RunDirectory
from rlhfuse.run.run_loop import RunLoop
from rlhfuse.tasks.role import POLICY

ITERATIONS = 2  # the first has no moments, and keeps nothing of one before it


class Rehearsal:
    """Runs phases on `rank`. The process is given to it: torch is patched and has one rank's process groups."""

    def __init__(self, draft: Candidate, plan: Plan, rank: int, progress: Callable[[str], None]) -> None:
        self._draft, self._plan, self._config = draft, plan, draft.config
        self._rank, self._samples = rank, Samples.of(draft)
        self._mode = FakeCuda(Meter())
        self._phases = PhaseLog(self._mode, progress)
        install(self._mode)
        EmptyFiles(draft.run.world_size)
        node = min(draft.run.world_size, draft.inputs.hardware.devices_per_node)
        os.environ |= {"LOCAL_WORLD_SIZE": str(node), "LOCAL_RANK": str(rank % node)}
        self._device = Device(CUDA, "fake")

    def run(self, wanted: Sequence[str] = WHOLE) -> RankRehearsal:
        """Build, then ITERATIONS of the wanted phases, as far as they can be left out."""
        world = self._draft.run.world_size
        dist.init_process_group("fake", rank=self._rank, world_size=world, store=FakeStore())
        with tempfile.TemporaryDirectory() as folder, self._mode:
            self._phases.switch("start")
            trainer, loop = self._build(Path(folder))
            gc.collect()
            meter: Any = self._phases
            trainer.memory = meter  # the trainer says itself where a phase begins
            for iteration in range(ITERATIONS):
                self._phases.iteration = iteration
                if "iteration" in wanted:
                    trainer.iterate(iteration)
                if {"moves", "generation"} & set(wanted):
                    trainer._reshard()
                    trainer._begin_moves(next(block for block in trainer.program if block.kind == "generate"))
                    self._generate(trainer)
                if "inference" in wanted:
                    self._phases.switch("inference")
                    self._score(trainer)
                trainer.scorer.release()
                if "training" in wanted:
                    self._train(trainer)
                if "checkpoint" in wanted:
                    self._save(loop, iteration + 1)
            self._phases.switch(None)
            moved, paused = trainer.others.moved, trainer.caller.answered if trainer.caller else 0
            del trainer, loop
            if "checkpoint" in wanted:
                self._resume(Path(folder))
            self._phases.switch(None)
        return self._phases.outcome(self._rank, moved, paused)

    # the phases -----------------------------------------------------------------------------------------------

    def _build(self, folder: Path, resume: Checkpoint | None = None) -> tuple[RehearsedTrainer, RunLoop]:
        """The run's own trainer, and its loop."""
        draft, config = self._draft, self._config
        facts = RunCompatibility.of(config, draft.run.specs, draft.tasks, draft.run.world_size, {}, {})
        prompt = Prompt(self._samples.tokens(0, config.data.max_prompt_tokens), {})
        words = SimpleNamespace(decode=lambda tokens, **_: "")
        folders = ModelFolders({}, dict(draft.run.specs))  # without paths: weights stay unset
        inputs = RunInputs(self._plan, (), folders, words, PromptSet((prompt,)), PromptSet(()), facts, resume)
        watchdog: Any = SimpleNamespace(progress=self._mode.note)
        store: Any = FakeStore()
        rank_models.TrainingStage = partial(SampledStage, self._mode)  # type: ignore[misc,assignment]
        trainer = RehearsedTrainer(inputs, self._rank, self._device, store, watchdog.progress, folder)
        trainer.prepare(self._samples)
        loop = RunLoop(trainer, RunDirectory(folder), watchdog)
        checkpoints: Any = loop.checkpoints
        checkpoints._rank = 0  # which completes a checkpoint when all files are there
        return trainer, loop

    def _generate(self, trainer: RehearsedTrainer) -> None:
        """All samples of the instance but for their last tokens, decoded to the end; then the engine's memory goes."""
        engine, params = trainer.engine, self._samples.sampling()
        length = self._samples.longest - RESPONSE_STEPS
        different = max(1, 2 * self._config.rollout.max_batched_tokens // length)  # the others find their blocks
        count = min(self._plan.batch.samples_per_instance, self._config.rollout.max_sequences_per_instance)
        for sample in range(count):
            engine.add(sample, self._samples.tokens(sample % different, length), params)
        # Beneath the end of generation, where samples that moved as tokens, or lost their blocks, are prefilled too.
        trainer.scorer.begin_load(self._plan.limits.early_models)
        while engine.has_unfinished():
            engine.step()
        engine.pause()
        trainer._release_generation()

    def _score(self, trainer: RehearsedTrainer) -> None:
        samples = max(1, self._plan.limits.score_tokens // self._samples.longest)
        for pack in range(PACKS):
            rollouts = [self._samples.rollout(pack * samples + number) for number in range(samples)]
            trainer.scorer.score(rollouts, trainer.models.place.scorers)

    def _train(self, trainer: RehearsedTrainer) -> None:
        batch = self._samples.training_batch(MINIBATCHES, self._plan.batch)
        algorithm = self._config.algorithm.model_copy(update={"minibatches": MINIBATCHES, "epochs": 1})
        trainer._train(self._config.held_iterations(POLICY), batch, algorithm)

    def _save(self, loop: RunLoop, done: int) -> None:
        """A checkpoint that is all written when this returns."""
        self._phases.switch("checkpoint")
        loop.save(done, {"metrics_bytes": 0, "samples_bytes": 0})
        loop.checkpoints.finish()

    def _resume(self, folder: Path) -> None:
        """A run that begins with the last checkpoint."""
        gc.collect()
        self._phases.switch("resume")
        _, loop = self._build(folder, Checkpoint.open(folder_of(folder) / f"iteration-{ITERATIONS}"))
        if (first := loop._restore()) != ITERATIONS:
            raise RuntimeError(f"a run that was saved after iteration {ITERATIONS} goes on with {first}")
