"""The folder that a run writes into: made or found by rank 0, owned while the run lives, the same on every rank.

What a former attempt left there without a checkpoint cannot be made again, so it is kept, in attempt-N.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhfuse.base.errors import InputError, writing
from rlhfuse.base.files import remove_leftovers, sync
from rlhfuse.base.launcher import launcher_command
from rlhfuse.config.settings import TrainerConfig
from rlhfuse.data.tool_journal import FILES as JOURNALS
from rlhfuse.monitor.run_lock import RunLock
from rlhfuse.parallel.collectives import from_rank_0, raise_on_all_ranks
from rlhfuse.run.checkpoint.checkpoint import METRICS, checkpoints_in, is_own
from rlhfuse.run.preflight import RunInputs, check_output

PREEMPTED = "preempted"  # whoever started the run is to start it again
KEPT = (  # of an attempt; the metrics last, because a folder without them has nothing to keep
    *("config.yaml", "plan.json", "schedule.json", "costs.json", "trace.json", "tensorboard", "wandb_id", "export"),
    *("forecast.json", "report.html", "samples.jsonl", JOURNALS, METRICS),
)


@dataclass(frozen=True)
class RunDirectory:
    """`lock` is rank 0's; None on the others."""

    path: Path
    lock: RunLock | None = None

    def go_on(self, trainer: TrainerConfig) -> str:
        """What to do to continue, with the command of this process or of the torchrun above it; not what a scheduler
        or script started before them."""
        command = _own_command()
        if trainer.output_dir != str(self.path):
            command.append(f"trainer.output_dir={self.path}")
        if trainer.resume != "auto":
            command.append("trainer.resume=auto")
        return f"go on with: {shlex.join(command)}"

    def check(self) -> None:
        """Raise InputError on rank 0 if another run has taken the folder over."""
        if self.lock:
            self.lock.check()


def _own_command() -> list[str]:
    """The command line that started this job on this machine, an installed program by its name."""
    words = launcher_command() or sys.orig_argv
    if len(words) > 1 and shutil.which(Path(words[1]).name) == words[1]:
        words = [Path(words[1]).name, *words[2:]]
    return list(words)


@contextmanager
def run_directory(inputs: RunInputs, name: str, rank: int) -> Iterator[RunDirectory]:
    """The run's folder while the block lasts; a collective. Raises JointError where it belongs to a run that lives."""
    with ExitStack() as stack:
        sent = None
        with raise_on_all_ranks():
            if rank == 0:
                folder = make_folder(inputs.config.trainer, name)
                lock = stack.enter_context(RunLock(folder))
                newest = newest_iteration(folder, inputs)
                check_newest(folder, newest, inputs)
                with writing(folder):
                    prepare(folder, inputs)
                sent = folder, newest
        path, newest = from_rank_0(sent)
        with raise_on_all_ranks():
            check_newest(path, newest, inputs)
        yield RunDirectory(path, lock if rank == 0 else None)


def make_folder(trainer: TrainerConfig, name: str) -> Path:
    """trainer.output_dir, or a new folder below runs/, which no other run of this second gets."""
    for number in itertools.count(1):
        suffix = f"-{number}" if number > 1 else ""
        folder = Path(trainer.output_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}{suffix}")
        with writing(folder):
            try:
                folder.mkdir(parents=True, exist_ok=bool(trainer.output_dir))
            except FileExistsError:
                if trainer.output_dir:
                    raise
                continue
            sync(folder.parent)
            return folder
    raise AssertionError("numbers do not end")


def prepare(folder: Path, inputs: RunInputs) -> None:
    """Clear away what killed writers left, and keep what an attempt left that this run does not go on from."""
    (folder / PREEMPTED).unlink(missing_ok=True)
    check_output(inputs.config)  # once more: a run that has just ended may have written since
    for place in (folder, folder / "checkpoints", folder / "export", folder / "export" / "best"):
        remove_leftovers(place)
    if not is_own(inputs.resume, folder):
        if kept := keep_attempt(folder):
            print(f"{folder} has no checkpoint of the attempt before: what it wrote is kept in {kept}", flush=True)
        for journal in folder.glob(JOURNALS):  # of one that did no iteration
            journal.unlink()


def keep_attempt(folder: Path) -> Path | None:
    """Move what a former attempt wrote into attempt-N, where it has done an iteration; returns that folder."""
    metrics = folder / METRICS
    if not metrics.exists() or metrics.stat().st_size == 0:
        return None
    names = (folder / f"attempt-{number}" for number in itertools.count(1))
    kept = next(attempt for attempt in names if not (attempt / METRICS).exists())
    kept.mkdir(exist_ok=True)
    for name in KEPT:
        for file in folder.glob(name):
            os.replace(file, kept / file.name)
    return kept


def newest_iteration(folder: Path, inputs: RunInputs) -> int | None:
    """What the run goes on from by what is in `folder` now."""
    if inputs.config.trainer.resume != "auto":
        return inputs.resume.iteration if inputs.resume else None
    return max((int(checkpoint.name.partition("-")[2]) for checkpoint in checkpoints_in(folder)), default=None)


def check_newest(folder: Path, newest: int | None, inputs: RunInputs) -> None:
    """Raise InputError unless the checkpoint that this rank has read is still the one to go on from."""
    if newest != (inputs.resume.iteration if inputs.resume else None):
        raise InputError(f"another run saved in {folder} while this one began; start it again")
