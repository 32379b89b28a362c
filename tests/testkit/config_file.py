"""A configuration of few words, in a file."""

from pathlib import Path

from rlhfuse.config.load import load_config
from rlhfuse.config.settings import RunConfig

MINIMAL = "actor: {path: models/a}\nreward: {path: models/r}\ndata: {train_files: [p.jsonl]}\n"


def load(folder: Path, text: str = MINIMAL, overrides: str | list[str] | tuple[str, ...] = ()) -> RunConfig:
    """What a file of this text and these overrides say; a line of them stands between spaces."""
    file = folder / "run.yaml"
    file.write_text(text)
    return load_config(file, overrides.split() if isinstance(overrides, str) else overrides)
