"""The loop around the iterations of a run: what is written of each, where it goes on and when it ends.

checkpoint to resume from -> iteration, its line in the logs, checkpoint, evaluation, where it is their turn -> export
"""

from __future__ import annotations

import gc
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhfuse.base.errors import InputError, JointError, RewardError, Stopped
from rlhfuse.costs.profiled import made_for
from rlhfuse.models.hf import hf_tensors
from rlhfuse.models.hf_folder import export_checkpoint
from rlhfuse.monitor.guard import SAVE_SECONDS
from rlhfuse.monitor.heartbeat import Waiting
from rlhfuse.monitor.metrics import plain_metrics
from rlhfuse.monitor.watchdog import Watchdog
from rlhfuse.parallel.collectives import any_rank, from_rank_0, raise_on_all_ranks
from rlhfuse.parallel.memory import process_line
from rlhfuse.parallel.optimizer_state import check_exportable, export_state, import_state
from rlhfuse.parallel.whole_weights import WholeWeights
from rlhfuse.run.checkpoint.checkpoint import Checkpoint, RunState, folder_of, is_own, metrics_kept
from rlhfuse.run.checkpoint.writer import CheckpointWriter, mark_finished, rewind
from rlhfuse.run.evaluation import BestScore, Evaluation
from rlhfuse.run.iteration_metrics import IterationStats
from rlhfuse.run.iteration_recorder import IterationRecord, IterationResult
from rlhfuse.run.peak_rate import peak_line
from rlhfuse.run.preflight import own_tokenizer
from rlhfuse.run.run_directory import RunDirectory
from rlhfuse.run.run_log import RunLog
from rlhfuse.run.threshold_controller import InForce
from rlhfuse.run.trainer import Trainer


@dataclass
class Ended:
    """An iteration whose training is done, on this rank."""

    done: int  # iterations, this one included
    result: IterationResult | None = None  # None: an earlier start ran it
    record: IterationRecord = IterationRecord({}, [], [])  # rank 0's
    saved: bool = False  # there is a checkpoint of it
    stop: bool = False  # the run ends here
    position: dict[str, Any] = field(default_factory=dict)  # of rank 0's logs, for the checkpoint


class RunLoop:
    """One rank's part of a run; all ranks go through it together."""

    def __init__(self, trainer: Trainer, directory: RunDirectory, watchdog: Watchdog) -> None:
        self.trainer, self.directory, self.watchdog = trainer, directory, watchdog
        self.inputs, self.config, self.run_dir = trainer.inputs, trainer.config, directory.path
        self.models, self.evaluator = trainer.models, trainer.evaluator
        self.checkpoints = CheckpointWriter(
            self.run_dir,
            trainer.rank,
            self.inputs.world_size,
            self.inputs.facts,
            self.config.trainer.keep_checkpoints,
            self.config.trainer.hang_seconds,
            watchdog.progress,
        )
        self.best: BestScore | None = None  # whose checkpoint is kept
        self._mean_seconds = 0.0  # of an iteration since this start; 0 before the first is done
        self.log: RunLog | None = None  # rank 0's
        self.executors = {"meet": self._run_books, "host": self._run_checkpoint, "generate": self._run_evaluation}
        blocks = trainer.plan.iteration.program(trainer.rank)
        self.program = [block for block in blocks if block not in trainer.program]

    def fit(self) -> None:
        """Run the iterations that are not done yet, then export. Raises JointError where a file cannot be written.

        Raises Stopped where a signal asked for an end, or the time is over: the iteration under way is done first, and
        saved.
        """
        self.watchdog.guard.go_on = self.directory.go_on(self.config.trainer)
        self.watchdog.guard.is_saving = self.checkpoints.is_saving
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
            self.log = self._start_log(first, has_row=row is not None) if self.trainer.rank == 0 else None
        if self.config.evaluates_first and not self.inputs.resume:
            evaluation = self.trainer.evaluate(-1)
            self._is_best(0, evaluation)
            with self.checkpoints.joint_failure():
                if self.log:
                    self.log.write(IterationRecord({"iteration": -1, **evaluation.metrics}, [], evaluation.samples))
        stopped, total = False, self.config.trainer.iterations
        if row is not None:
            record, here = IterationRecord(dict(row), [], []), is_own(self.inputs.resume, self.run_dir)
            stopped = self._conclude(Ended(first, record=record, saved=here))
        self._finish_first("what has begun is finished and saved first")
        done, guard, work = first, self.watchdog.guard, self.trainer.clock.begin()
        while done < total and not stopped:
            took = f", those before took {self._mean_seconds:.0f} s each" if self._mean_seconds else ""
            guard.finishing = f"iteration {done} of {total} is finished and saved first{took}"
            try:
                result = self.trainer.iterate(done)
            except FloatingPointError as error:
                raise type(error)(f"iteration {done}: {error}") from error
            done += 1
            self._mean_seconds = work.seconds / (done - first)
            stopped = self._conclude(Ended(done, result))
        self._finish_first("the checkpoint is written first" if stopped else "the export is written first")
        broken = None if stopped else self._export()
        self.checkpoints.finish()
        with self.checkpoints.joint_failure():
            for opened in (self.log, self.trainer.rewarder, self.trainer.caller):
                if opened:
                    opened.close()
            if self.log and not stopped:
                guard.forget()
                mark_finished(self.run_dir, total)
        if broken:
            raise broken
        if stopped:
            saved = f"saved in {self._folder(done)}" if self._can_save() else "not saved: sgd has no checkpoints"
            told = f"stopped: {done} of {total} iterations are done, {saved}; {guard.go_on}"
            if any_rank(guard.notice):
                guard.note(told)
                guard.file = None  # that was the last word
                any_rank(False)  # nobody leaves before: the launcher ends who is left
            raise Stopped(told)

    def _finish_first(self, what: str) -> None:
        """Let an end that is asked for wait for `what`; a collective: no rank begins it while another would end."""
        self.watchdog.guard.finishing = what
        any_rank(False)

    def _asked_to_stop(self, done: int) -> bool:
        """True if this rank was asked to end, or if the next iteration would outlast trainer.stop_after."""
        guard = self.watchdog.guard
        if done < self.config.trainer.iterations and guard.seconds_left() < self._mean_seconds:
            guard.notice = True
        return guard.stop_asked or guard.notice

    def _conclude(self, ended: Ended) -> bool:
        """Run the blocks that follow training. Returns True if the run ends here. A collective.

        Line and checkpoint come before the evaluation, which may fail; its results are added to them afterwards.
        """
        for block in self.program:
            if not block.on_turn:
                self.watchdog.progress(f"iteration {ended.done - 1}: {block}")
            self.executors[block.kind](ended)
        return ended.stop

    def _run_books(self, ended: Ended) -> None:
        own = ended.result and ended.result.stats, self._asked_to_stop(ended.done)
        ended.stop, in_force = self.checkpoints.meet(own, partial(self._write_books, ended))
        self.trainer.threshold.follow(in_force)

    def _write_books(self, ended: Ended, ranks: Sequence[tuple[IterationStats | None, bool]]) -> tuple[bool, InForce]:
        """Rank 0's part: record the iteration, write its line and decide, for all ranks, what follows."""
        ended.stop, threshold = any(asked for _, asked in ranks), self.trainer.threshold
        if ended.result:
            ended.record = self.trainer.recorder.record(ended.result, [stats for stats, _ in ranks if stats])
        assert self.log, "rank 0 writes one"
        due, evaluates = self._is_due(ended), self.config.evaluates_after(ended.done)
        self.directory.check()
        before = self.log.position() if due and evaluates else {}
        self.log.write(ended.record)
        made = made_for(self.config.trainer, self.inputs.plan.tasks, self.inputs.models.specs)
        threshold.save_costs(self.run_dir / "costs.json", made)
        ended.position = self.log.position() if due else {}
        if evaluates and due:
            row = plain_metrics(ended.record.metrics)
            ended.position |= {"metrics_bytes": before["metrics_bytes"], "row": row}
        return ended.stop, threshold.in_force

    def _is_due(self, ended: Ended) -> bool:
        """True if a checkpoint is due."""
        return not ended.saved and (self.config.saves_after(ended.done) or (ended.stop and self._can_save()))

    def _run_checkpoint(self, ended: Ended) -> None:
        if self._is_due(ended):
            self.save(ended.done, ended.position)
            ended.saved = True

    def _run_evaluation(self, ended: Ended) -> None:
        log, done = self.log, ended.done
        if ended.stop or not self.config.evaluates_after(done):
            return
        try:
            evaluation = self.trainer.evaluate(done - 1)
        except (FloatingPointError, RewardError) as error:
            without = "trainer.eval_every=0" + (" trainer.keep_best=false" if self.config.trainer.keep_best else "")
            where = f"the evaluation after iteration {done - 1}"
            raise type(error)(f"{where}: {error}; {without} goes on without it") from error
        best = self._is_best(done, evaluation)
        ended.stop = any_rank(self._asked_to_stop(done))
        with self.checkpoints.joint_failure():
            if log:
                log.complete(ended.record, evaluation)
                ended.position = log.position()
                if ended.saved:
                    self.checkpoints.complete(done, self._position(done, ended.position))
        if not ended.saved and (best or (ended.stop and self._can_save())):
            self.save(done, ended.position)

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
        trainer = self.trainer
        log = RunLog(self.run_dir, self.config, trainer.plan, first - has_row, kept, samples)
        lines = peak_line(trainer.peak_flops, trainer.device), *trainer.engine.lines
        lines = *lines, process_line(trainer.device, trainer.plan.process_bytes)
        print("\n".join(line for line in lines if line), flush=True)
        return log

    def _is_best(self, done: int, evaluation: Evaluation) -> bool:
        """Whether the checkpoint of now is to be kept instead of the best so far."""
        worse = self.best is not None and evaluation.score <= self.best.score
        if not self.config.trainer.keep_best or worse or not math.isfinite(evaluation.score):
            return False
        self.best = BestScore(done, evaluation.score, self.evaluator.digest)
        return True

    def _can_save(self) -> bool:
        with suppress(InputError):
            for model in self.models.trained.values():
                check_exportable(model.optimizer)
            return True
        return False

    def save(self, done: int, position: Mapping[str, Any]) -> None:
        """Begin to write checkpoints/iteration-`done`; a collective. Rank 0 gives the `position` of its logs."""
        self.watchdog.progress(f"saving checkpoint iteration-{done}")
        state = RunState(self.trainer.threshold.state(), self.trainer.carried(), self._position(done, position))
        owned = {role: export_state(model.optimizer) for role, model in self.models.trained.items()}
        self.checkpoints.start(done, state, owned, self.best.done if self.best else None)

    def _position(self, done: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint says of where the run is, beside the position of its `logs`."""
        return {
            **logs,
            "prompts_drawn": self.trainer.sampler.drawn,
            "day": self.inputs.day,
            "learning_rate": {role: self.trainer.learning_rate(role, done - 1) or 0.0 for role in self.models.trained},
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
        self.trainer.carry_on(state.algorithm, state.position["prompts_drawn"])
        self.trainer.threshold.restore(dict(state.threshold), str(resume.folder), lengths_alone=bool(moved))
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
        elif self.trainer.rank == 0:
            with suppress(FileNotFoundError):  # an earlier start's, by other held-out prompts or none
                os.replace(folder / "best", folder / "best-before")
            if self.best:
                print(f"no evaluation was better than that before training: there is no {folder / 'best'}", flush=True)
        return None

    def export(self, folder: Path) -> None:
        """Write the trained models in Hugging Face layout, each in a folder of its own; a collective."""
        self.watchdog.progress("exporting models")
        for role in self.config.trained():
            path, spec = self.inputs.models.paths[role], self.inputs.models.specs[role]
            trained = self.models.trained[role]
            weights, head = WholeWeights(trained.optimizer.modules.values()), trained.role.scalar_head
            tensors = hf_tensors(weights, spec, head)  # all ranks make them, rank 0 alone with values
            with self.checkpoints.joint_failure():
                if self.trainer.rank == 0:
                    own = own_tokenizer(self.config)
                    export_checkpoint(tensors, head, path, folder / role, own, self.watchdog.progress)
                else:
                    self.watchdog.progress(Waiting(f"waiting for the export of the {role}"))
                    deque(tensors, maxlen=0)
