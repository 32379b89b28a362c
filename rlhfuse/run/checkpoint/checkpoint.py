"""Checkpoints of a run: written whole or not at all (writer.py), and checked before anything is launched.

OUTPUT_DIR/checkpoints/iteration-N/rank-R.safetensors    what rank R owns of every trained model (shard_files.py)
                                  /manifest.json         everything else, and size and sha256 of every file
                       latest                            the name of the newest, for people and scripts
OUTPUT_DIR/finished.json                                 written when a run has done all its iterations
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import is_listed, read_text
from rlhfuse.base.json_values import from_json, json_value, read_json
from rlhfuse.config.settings import RunConfig
from rlhfuse.run.checkpoint.compatibility import RunCompatibility
from rlhfuse.run.checkpoint.shard_files import FileFacts, ShardReader

VERSION = 2
MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
METRICS_BYTES = "metrics_bytes"
NAME = re.compile(r"iteration-(\d+)")
RANDOM = "every draw is a function of trainer.seed, its purpose and its place: there is nothing to restore"


def _digest(raw: Mapping[str, Any]) -> str:
    """Hash what manifest.json says beside its digest, however its text is laid out."""
    return hashlib.sha256(json.dumps({key: raw[key] for key in raw if key != "digest"}).encode()).hexdigest()


@dataclass(frozen=True)
class RunState:
    """What a run knows beside its tensors, as JSON values."""

    threshold: Mapping[str, Any]  # ThresholdController's: R_t, length statistics, measured costs
    algorithm: Mapping[str, Any]  # what the algorithm carries on: `kl_coef`, and `scores`, their RunningMoments
    # Sizes of the run's logs; the best held-out score; `row`, the iteration's line of metrics.jsonl, as long as the
    # evaluation that completes it is not done; `day`, which chat templates write. For people: learning rates.
    position: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says. `iteration` counts the finished ones: a run that continues starts with it."""

    iteration: int
    facts: RunCompatibility
    state: RunState
    files: tuple[FileFacts, ...]

    def to_text(self) -> str:
        """JSON with one line per field."""
        raw = {"version": VERSION, **asdict(self), "random": RANDOM}
        raw["digest"] = _digest(raw)
        lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in raw.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @staticmethod
    def parse(text: str, where: str) -> Manifest:
        """Inverse of `to_text`. Raises InputError naming `where`."""
        raw = json_value(text, where, fix="use another checkpoint")
        digest = raw.pop("digest", None) if isinstance(raw, dict) else None
        manifest = from_json(Manifest, raw, where, VERSION)
        if digest != _digest(raw):
            raise InputError(f"{where} is not as it was written: its digest is another one; use another checkpoint")
        if manifest.iteration < 0 or not manifest.files:
            wrong = f"iteration {manifest.iteration} of {len(manifest.files)} files"
        elif outside := [file.name for file in manifest.files if file.name != Path(file.name).name]:
            wrong = f"{outside[0]!r} is no file of its folder"
        elif type(position := manifest.state.position.get(METRICS_BYTES)) is not int or position < 0:
            wrong = f"{METRICS_BYTES} {position!r:.40} is no length of a file"
        else:
            return manifest
        raise InputError(f"{where}: {wrong}; use another checkpoint")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that was found whole."""

    folder: Path
    manifest: Manifest

    @property
    def iteration(self) -> int:
        """The first iteration that is not in it."""
        return self.manifest.iteration

    @property
    def metrics_bytes(self) -> int:
        """Length of metrics.jsonl when it was saved."""
        return self.manifest.state.position[METRICS_BYTES]

    @staticmethod
    def open(folder: Path) -> Checkpoint:
        """Read the manifest and hold every file against it. Raises InputError naming the file and what is wrong."""
        fix = "set trainer.resume to auto, never or a folder checkpoints/iteration-N"
        try:
            if folder.name == "latest" and folder.is_file():
                name = read_text(folder, fix).strip()
                if not NAME.fullmatch(name):
                    raise InputError(f"{folder} names {name[:40]!r}, no checkpoint beside it; {fix}")
                folder = folder.with_name(name)
            if not (folder / MANIFEST).is_file():
                raise InputError(f"{folder / MANIFEST} is missing: {folder} is no whole checkpoint; {fix}")
            manifest = Manifest.parse(read_text(folder / MANIFEST, fix), str(folder / MANIFEST))
            for facts in manifest.files:
                facts.check(folder)
        except OSError as error:  # no permission, or the disk's
            raise InputError(f"cannot read {error.filename or folder}: {error.strerror}; make it readable") from None
        return Checkpoint(folder, manifest)

    def open_reader(self) -> ShardReader:
        """The tensors of all ranks, memory-mapped: as long as the reader lives, removing the files frees no space."""
        return ShardReader([self.folder / facts.name for facts in self.manifest.files])


# finding --------------------------------------------------------------------------------------------------------


def find_checkpoint(config: RunConfig) -> Checkpoint | None:
    """What `trainer.resume` asks for, its files whole; None for a fresh start or a finished run.

    Under `auto` the newest checkpoint of output_dir is taken. A broken one is not passed over in silence: the
    InputError names the newest whole one before it.
    """
    trainer = config.trainer
    if trainer.resume == "never" or is_finished(config):
        return None
    return _open_newest(config) if trainer.resume == "auto" else Checkpoint.open(Path(trainer.resume))


def check_resumed(checkpoint: Checkpoint, config: RunConfig, facts: RunCompatibility) -> None:
    """Raise InputError unless the run of `facts` can go on from `found`."""
    trainer, where = config.trainer, str(checkpoint.folder)
    facts.check(checkpoint.manifest.facts, where)
    if trainer.output_dir:
        _check_metrics(checkpoint, Path(trainer.output_dir))
    if checkpoint.iteration > trainer.iterations:
        done = f"{where} has {checkpoint.iteration} iterations done"
        raise InputError(f"{done}, trainer.iterations={trainer.iterations}; set it higher")


def checkpoints_in(run_dir: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first; unfinished `.partial` ones are left out."""
    folders = folder_of(run_dir).glob("iteration-*")
    named = [(NAME.fullmatch(folder.name), folder) for folder in folders]
    return [folder for _, folder in sorted((int(match[1]), folder) for match, folder in named if match)]


def finished_iterations(run_dir: Path) -> int:
    """Iterations of the run that was finished in this folder, -1 if none was. Raises InputError for a broken file."""
    file = run_dir / "finished.json"
    if not is_listed(file):
        return -1
    fix = "remove it to continue the run"
    done = raw.get("iterations") if isinstance(raw := read_json(file, fix=fix), dict) else raw
    if type(done) is not int or done < 0:
        raise InputError(f"{file}: iterations is {done!r:.40}, no number of them; {fix}")
    return done


def is_finished(config: RunConfig) -> bool:
    """Whether `auto` has nothing left to do."""
    trainer = config.trainer
    looks = trainer.resume == "auto" and trainer.output_dir
    return bool(looks) and finished_iterations(Path(trainer.output_dir)) >= trainer.iterations


def _open_newest(config: RunConfig) -> Checkpoint | None:
    """The newest checkpoint of output_dir, None where there is none."""
    if not config.trainer.output_dir:
        raise InputError("trainer.resume=auto looks into trainer.output_dir, which is not set; set it")
    run_dir = Path(config.trainer.output_dir)
    folders = checkpoints_in(run_dir)
    if not folders:
        if (done := finished_iterations(run_dir)) > 0:  # a fresh start would write over it
            raise InputError(
                f"{run_dir} holds a finished run of {done} iterations without checkpoints: it cannot be continued to "
                f"trainer.iterations={config.trainer.iterations}; choose another output_dir"
            )
        return None
    try:
        return Checkpoint.open(folders[-1])
    except InputError as broken:
        for folder in reversed(folders[:-1]):
            try:
                Checkpoint.open(folder)
            except InputError:
                continue
            raise InputError(f"{broken}; the newest good one: set trainer.resume={folder}") from None
        raise InputError(f"{broken}; no good one before it: remove {folders[-1].parent} to start afresh") from None


def is_own(checkpoint: Checkpoint | None, run_dir: Path) -> bool:
    """Whether a run that goes on from `checkpoint` in `run_dir` has its past there."""
    return checkpoint is not None and checkpoint.folder.parent.parent.resolve() == run_dir.resolve()


def metrics_kept(checkpoint: Checkpoint | None, run_dir: Path) -> int:
    """Bytes of metrics.jsonl that stay when a run goes on from `checkpoint` in `run_dir`: those of its own past."""
    return checkpoint.metrics_bytes if checkpoint and is_own(checkpoint, run_dir) else 0


def _check_metrics(checkpoint: Checkpoint, run_dir: Path) -> None:
    """A run that goes on in its folder must still have the lines that it had."""
    file, had = run_dir / METRICS, metrics_kept(checkpoint, run_dir)
    size = file.stat().st_size if file.exists() else 0
    if size < had:
        raise InputError(
            f"{file} has {size} bytes, but {checkpoint.folder} was saved when it had {had}: lines are lost; bring the "
            f"file back, or go on elsewhere with trainer.resume={checkpoint.folder} and another output_dir"
        )


def folder_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints"
