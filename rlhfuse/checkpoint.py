"""Checkpoints of a run: written whole or not at all, and checked before anything is launched.

    OUTPUT_DIR/checkpoints/iteration-N/rank-R.safetensors    actor and critic of rank R: optimizer_state.py's names
                                      /manifest.json         everything else, and size and sha256 of every file
                           latest                            the name of the newest, for people and scripts
    OUTPUT_DIR/finished.json                                 written when a run has done all its iterations

A checkpoint is written under `iteration-N.partial` and renamed when the last byte is on disk, so a crash while
saving leaves the one before. N counts finished iterations: the run that continues starts with iteration N. Random
draws are functions of (seed, iteration, ...), so no generator and no data position is stored.

Knows nothing of models and optimizers: tensors come and go by name. A checkpoint continues on the world size and
the layouts that it was saved with.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhfuse.config import RunConfig
from rlhfuse.errors import InputError
from rlhfuse.parallel.collect import all_gather_bytes
from rlhfuse.schedule.io import write_text
from rlhfuse.simulator.layouts import Task
from rlhfuse.spec import ModelSpec

VERSION = 1
MANIFEST = "manifest.json"
# what a run may change when it continues: where, how long and how watched it runs, and what moves work in time only
FREE_GROUPS = ("fusion", "trainer", "parallel")  # layouts are compared as layouts, with their defaults filled
# of those groups, yet change numbers
FREE_KEYS = ("reward.timeout_seconds", "reward.workers")  # of the other groups, yet change none
FIXED_KEYS = ("fusion.actor_microbatches", "parallel.sequence_parallel", "trainer.seed", "trainer.dtype")


@dataclass(frozen=True)
class RunFacts:
    """What a checkpoint and the run that continues it must have in common."""

    world_size: int
    layouts: Mapping[str, str]  # task -> layout
    models: Mapping[str, Mapping[str, Any]]  # role -> fields of its ModelSpec
    settings: Mapping[str, Any]  # dotted key -> value, of keys that change a number

    @staticmethod
    def of(
        config: RunConfig, specs: Mapping[str, ModelSpec], tasks: tuple[Task, ...], world_size: int
    ) -> "RunFacts":
        """In JSON's values, so that what was read compares equal to what was written."""
        flat = _flatten(asdict(config), "")
        free = {k for k in flat if k in FREE_KEYS or k.split(".")[0] in FREE_GROUPS and k not in FIXED_KEYS}
        settings = {k: v for k, v in flat.items() if k not in free}
        facts = RunFacts(
            world_size,
            {task.name: str(task.layout) for task in tasks},
            {role: asdict(spec) for role, spec in specs.items()},
            settings,
        )
        return RunFacts(**json.loads(json.dumps(asdict(facts))))

    def check(self, other: "RunFacts", where: str) -> None:
        """Raise InputError naming the first field in which the checkpoint `other` differs from this run."""
        if other.world_size != self.world_size:
            raise InputError(
                f"{where} was saved by {other.world_size} ranks, this run has {self.world_size}; "
                f"start {other.world_size} ranks"
            )
        if other.models.keys() != self.models.keys():
            raise InputError(
                f"{where} has the models {', '.join(sorted(other.models))}, this run {', '.join(sorted(self.models))}; "
                "set algorithm.name, reference.path, reward.path and reward.function as they were"
            )
        for task, layout in self.layouts.items():
            if other.layouts.get(task) != layout:
                found = other.layouts.get(task)
                raise InputError(f"{where} has {task}={found}, this run {layout}; set parallel.{task}={found}")
        for role, shape in self.models.items():
            for name, value in shape.items():
                found = other.models.get(role, {}).get(name)
                if found != value:
                    raise InputError(
                        f"{where} has a {role} of {name}={found}, {role}.path holds one of {value}; use the same model"
                    )
        for key in sorted(self.settings.keys() | other.settings.keys()):
            mine, found = self.settings.get(key), other.settings.get(key)
            if mine != found:
                raise InputError(f"{where} was saved with {key}={found}, this run has {mine}; set {key}={found}")


@dataclass(frozen=True)
class FileFacts:
    """One rank's file."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says. `threshold` is ThresholdControl's state, `algorithm` has the `kl_coef` in force."""

    iteration: int
    facts: RunFacts
    threshold: Mapping[str, Any]
    algorithm: Mapping[str, Any]
    files: tuple[FileFacts, ...]

    def to_text(self) -> str:
        """JSON with one line per field."""
        raw = {"version": VERSION, **asdict(self)}
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in raw.items()) + "\n}\n"

    @staticmethod
    def parse(text: str, where: str) -> "Manifest":
        """Inverse of `to_text`. Raises InputError naming `where`."""
        try:
            raw = json.loads(text)
            if raw["version"] != VERSION:
                raise InputError(f"{where}: version {raw['version']!r} is unknown; this program reads {VERSION}")
            return Manifest(
                int(raw["iteration"]),
                RunFacts(**raw["facts"]),
                raw["threshold"],
                raw["algorithm"],
                tuple(FileFacts(**row) for row in raw["files"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{where} is no manifest of a checkpoint ({error!r}); use another checkpoint") from None


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
    def run_dir(self) -> Path:
        return self.folder.parent.parent

    @staticmethod
    def open(folder: Path) -> "Checkpoint":
        """Read the manifest and hold every file against it. Raises InputError naming the file and what is wrong."""
        if folder.name == "latest" and folder.is_file():
            folder = folder.with_name(folder.read_text().strip())
        try:
            text = (folder / MANIFEST).read_text()
        except (OSError, UnicodeDecodeError):
            raise InputError(
                f"{folder / MANIFEST} is missing or unreadable: {folder} is no whole checkpoint; "
                "set trainer.resume to auto, never or a folder checkpoints/iteration-N"
            ) from None
        manifest = Manifest.parse(text, str(folder / MANIFEST))
        for facts in manifest.files:
            _check_file(folder / facts.name, facts)
        return Checkpoint(folder, manifest)

    def load(self, rank: int) -> dict[str, dict[str, Tensor]]:
        """role -> tensors of `rank`, in host memory."""
        file = self.folder / file_name(rank)
        found: dict[str, dict[str, Tensor]] = {}
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    role, _, rest = name.partition(".")
                    found.setdefault(role, {})[rest] = opened.get_tensor(name)
        except (SafetensorError, OSError, KeyError) as error:
            raise InputError(f"{file} cannot be read ({error}); resume from another checkpoint") from None
        return found


# finding --------------------------------------------------------------------------------------------------------


def find_checkpoint(config: RunConfig, facts: RunFacts) -> Checkpoint | None:
    """What `trainer.resume` asks for; None for a fresh start or a finished run. Checks everything.

    Under `auto` the newest checkpoint of output_dir is taken. A broken one is not passed over in silence: the
    InputError names the newest whole one before it.
    """
    trainer = config.trainer
    if trainer.resume == "never" or is_finished(config):
        return None
    found = _open_newest(config) if trainer.resume == "auto" else Checkpoint.open(Path(trainer.resume))
    if found is None:
        return None
    where = str(found.folder)
    facts.check(found.manifest.facts, where)
    if len(found.manifest.files) != facts.world_size:
        count = len(found.manifest.files)
        raise InputError(f"{where}/{MANIFEST} lists {count} files, not {facts.world_size}; use another checkpoint")
    if found.iteration > trainer.iterations:
        raise InputError(
            f"{where} has {found.iteration} iterations done, trainer.iterations={trainer.iterations}; set it higher"
        )
    return found


def checkpoints_in(run_dir: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first; unfinished `.partial` ones are left out."""
    named = [(re.fullmatch(r"iteration-(\d+)", folder.name), folder) for folder in _folder(run_dir).glob("iteration-*")]
    return [folder for _, folder in sorted((int(match[1]), folder) for match, folder in named if match)]


def finished_iterations(run_dir: Path) -> int:
    """Iterations of the run that was finished in this folder, or 0. Raises InputError for a broken file."""
    file = run_dir / "finished.json"
    if not file.exists():
        return 0
    try:
        return int(json.loads(file.read_text())["iterations"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({error!r}); remove it to continue the run") from None


def is_finished(config: RunConfig) -> bool:
    """Whether `auto` has nothing left to do."""
    trainer = config.trainer
    if trainer.resume != "auto" or not trainer.output_dir:
        return False
    return finished_iterations(Path(trainer.output_dir)) >= trainer.iterations


def _open_newest(config: RunConfig) -> Checkpoint | None:
    """The newest checkpoint of output_dir, None where there is none."""
    if not config.trainer.output_dir:
        raise InputError("trainer.resume=auto looks into trainer.output_dir, which is not set; set it")
    run_dir = Path(config.trainer.output_dir)
    folders = checkpoints_in(run_dir)
    if not folders:
        if done := finished_iterations(run_dir):  # a fresh start would write over it
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


def _check_file(file: Path, facts: FileFacts) -> None:
    if not file.is_file():
        raise InputError(f"{file} is missing: the checkpoint is incomplete")
    size = file.stat().st_size
    if size != facts.size_bytes:
        raise InputError(f"{file} has {size} bytes, its manifest says {facts.size_bytes}: the file is corrupt")
    if file_digest(file) != facts.sha256:
        raise InputError(f"{file} does not have the sha256 of its manifest: the file is corrupt")


# writing --------------------------------------------------------------------------------------------------------


def save_checkpoint(
    run_dir: Path, iteration: int, rank: int, tensors: Mapping[str, Mapping[str, Tensor]], facts: RunFacts,
    threshold: Mapping[str, Any], keep: int, algorithm: Mapping[str, Any],
) -> int:  # fmt: skip
    """Write checkpoints/iteration-N and drop all but the last `keep`; a collective. Returns its bytes.

    `tensors`: role -> this rank's tensors. Raises InputError when rank 0 does not see every rank's file.
    """
    done = _folder(run_dir) / f"iteration-{iteration}"
    partial = done.with_name(f"{done.name}.partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    mine = write_rank_file(partial, rank, tensors)
    files = tuple(FileFacts(**json.loads(row)) for row in all_gather_bytes(json.dumps(asdict(mine)).encode()))
    if rank == 0:
        for file in files:
            if not (partial / file.name).is_file():
                raise InputError(f"rank 0 cannot see {partial / file.name}: put output_dir on storage all nodes share")
        with open(partial / MANIFEST, "w", encoding="utf-8") as stream:
            stream.write(Manifest(iteration, facts, threshold, algorithm, files).to_text())
            stream.flush()
            os.fsync(stream.fileno())
        _sync_folder(partial)
        os.replace(partial, done)
        _sync_folder(done.parent)
        write_text(done.parent / "latest", done.name + "\n")
        for old in checkpoints_in(run_dir)[:-keep]:
            _remove(old)
    return sum(file.size_bytes for file in files)


def write_rank_file(folder: Path, rank: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> FileFacts:
    """One rank's safetensors file, on disk when this returns."""
    flat = {f"{role}.{name}": tensor.contiguous() for role in tensors for name, tensor in tensors[role].items()}
    file = folder / file_name(rank)
    save_file(flat, str(file))
    os.chmod(file, 0o644)
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())
    return FileFacts(file.name, file.stat().st_size, file_digest(file))


def rewind(run_dir: Path, iteration: int) -> list[str]:
    """Remove what a run that continues with `iteration` is going to make again; returns the names. Rank 0 alone."""
    late = [folder for folder in checkpoints_in(run_dir) if int(folder.name.partition("-")[2]) > iteration]
    stale = [*late, *_folder(run_dir).glob("iteration-*.partial")]
    for folder in stale:
        _remove(folder)
    left = checkpoints_in(run_dir)
    if late and left:
        write_text(_folder(run_dir) / "latest", left[-1].name + "\n")
    elif late:
        (_folder(run_dir) / "latest").unlink(missing_ok=True)
    (run_dir / "finished.json").unlink(missing_ok=True)
    return sorted(folder.name for folder in stale)


def mark_finished(run_dir: Path, iterations: int) -> None:
    """Say that all iterations and the export are done; rank 0 alone, as its last act."""
    write_text(run_dir / "finished.json", json.dumps({"iterations": iterations}) + "\n")


def file_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def file_digest(file: Path) -> str:
    sha = hashlib.sha256()
    with open(file, "rb") as stream:
        while piece := stream.read(1 << 20):
            sha.update(piece)
    return sha.hexdigest()


def _folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _remove(folder: Path) -> None:
    """Under another name first: a checkpoint half removed must not look like one."""
    doomed = folder.with_name(f"{folder.name.removesuffix('.partial')}.partial")
    if doomed != folder:
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(folder, doomed)
    shutil.rmtree(doomed)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flatten(raw: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
