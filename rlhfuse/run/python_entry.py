"""Training from Python, for whoever has the reward at hand as a function: a job of its own, waited for.

The caller's process stays as it is, without torch, process groups and signal handlers: rlhfuse-train runs beside it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhfuse.base.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, InputError
from rlhfuse.base.launcher import end_with_parent
from rlhfuse.config.load import load_config
from rlhfuse.data.reward_function import name_of, raise_in_reward_file
from rlhfuse.decisions.layouts import planned_world_size
from rlhfuse.monitor.metrics import read_metrics


@dataclass(frozen=True)
class FinishedRun:
    """What a run left: its folder, and the lines of its metrics.jsonl, one an iteration."""

    folder: Path
    metrics: list[dict[str, Any]]


def train(
    config: Mapping[str, Any] | str | Path,
    reward: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | None,
    ranks: int | None,
    overrides: Sequence[str],
) -> FinishedRun:
    """As `rlhfuse.train`, which documents it."""
    raise_in_reward_file()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InputError(
            "rlhfuse.train starts its ranks itself: call it without torchrun, and not where a rank imports it"
        )
    file = None if isinstance(config, Mapping) else config
    settings = [*(_arguments(config) if isinstance(config, Mapping) else ()), *overrides]
    if reward is not None:
        listed = reward if isinstance(reward, (list, tuple)) else [reward]
        names = [one if isinstance(one, str) else name_of(one) for one in listed]
        settings += _arguments({"reward": {"function": names}})
    loaded = load_config(file, settings)
    if not loaded.trainer.output_dir:
        name = f"{Path(file or 'run').stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        settings += _arguments({"trainer": {"output_dir": f"runs/{name}"}})
        loaded = load_config(file, settings)
    count = ranks or planned_world_size(loaded, None, job={})
    program = find_spec("rlhfuse.tools.train_ppo")
    assert program and program.origin, "it is installed with this package"
    command = [sys.executable, program.origin, "--ranks", str(count)]  # not -m: that imports from the current folder
    _run([*command, *(("--config", str(file)) if file else ()), *settings])
    folder = Path(loaded.trainer.output_dir)
    return FinishedRun(folder, read_metrics(folder / "metrics.jsonl"))


def _arguments(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Nested settings as `key=value`, values in JSON, which YAML reads."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _arguments(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value, default=str)}"


def _run(command: Sequence[str]) -> None:
    """Run it to its end; Ctrl-C is handed on once. Raises InputError, KeyboardInterrupt or RuntimeError with its error.

    It ends as by SIGTERM when this process ends before it.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "error.json"
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # a reward's module is found as here
        environment = {**os.environ, "PYTHONPATH": paths, "TORCHELASTIC_ERROR_FILE": str(said)}
        process = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,  # a terminal's Ctrl-C reaches this process alone
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        if code == 0:
            return
        message = json.loads(said.read_text())["message"] if said.exists() else {}
    text = message.get("message", "") if isinstance(message, Mapping) else str(message)
    text = text.removeprefix("error: ") or f"the run ended with exit code {code}; its last lines say why"
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(text)
    raise (InputError if code == EXIT_BAD_INPUT else RuntimeError)(text)
