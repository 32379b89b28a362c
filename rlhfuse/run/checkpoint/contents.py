"""What the files that a run reads hold, as digests: between its starts they may move, but not change."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import is_listed
from rlhfuse.config.settings import RunConfig
from rlhfuse.models.hf import checkpoint_index
from rlhfuse.models.hf_folder import carried_files
from rlhfuse.run.checkpoint.shard_files import file_digest
from rlhfuse.tasks.role import Role

# In this order, and others behind them, as in the digests of all checkpoints.
FIRST = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "added_tokens.json")
FIRST += ("vocab.json", "merges.txt", "chat_template.jinja")
PIECES, PIECE_BYTES = 64, 4096  # of a file of weights, spread over it: gigabytes are not read at every start


def contents_of(config: RunConfig, models: Mapping[Role, Path], tokenizer: Path) -> dict[str, str]:
    """Setting -> digest of what it names; `models`: folder of each role. Raises InputError for an unreadable file."""
    try:
        digests = {"data.train_files": _joint_digest(file_digest(Path(file)) for file in config.data.train_files)}
        words = sorted(carried_files(tokenizer), key=lambda file: FIRST.index(file.name) if file.name in FIRST else 99)
        digests["actor.tokenizer"] = _joint_digest(f"{file.name} {file_digest(file)}" for file in words)
        digests |= {f"{role}.path": _model_digest(folder) for role, folder in models.items()}
        if functions := [_function_digest(name) for name in config.reward.function if ":" in name]:
            digests["reward.function"] = functions[0] if len(functions) == 1 else _joint_digest(functions)
        if tools := config.rollout.multi_turn.enable and config.rollout.multi_turn.function_tool_path:
            name = tools if tools.rpartition(":")[1] else f"{tools}:"
            digests["rollout.multi_turn.function_tool_path"] = _function_digest(name)
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}; make it readable") from None
    return digests


def _model_digest(folder: Path) -> str:
    """Digest of configurations, index, and of each file of weights its size, header and pieces."""
    listed = [folder / name for name in ("config.json", "generation_config.json", "model.safetensors.index.json")]
    weights = sorted({entry.file for entry in checkpoint_index(folder).values()})
    parts = [f"{file.name} {file_digest(file)}" for file in listed if is_listed(file)]
    return _joint_digest([*parts, *(f"{file.name} {_sketch(file)}" for file in weights)])


def _sketch(file: Path) -> str:
    size, sha = file.stat().st_size, hashlib.sha256()
    sha.update(str(size).encode())
    with open(file, "rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        sha.update(stream.read(header_bytes))
        for piece in range(PIECES):
            stream.seek(max(size - PIECE_BYTES, 0) * piece // (PIECES - 1))
            sha.update(stream.read(PIECE_BYTES))
    return sha.hexdigest()


def _function_digest(name: str) -> str:
    """Digest of the file that defines the function, and of its name in there; a module without a file is its name."""
    source, _, attribute = name.rpartition(":")
    if not source.endswith(".py"):
        spec = importlib.util.find_spec(source)
        if spec is None or not spec.has_location or spec.origin is None:
            return _joint_digest([name])
        source = spec.origin
    return _joint_digest([file_digest(Path(source)), attribute])


def _joint_digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
