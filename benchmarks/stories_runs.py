"""Runs of tools/train_ppo.py on the little story model, as learning.py and end_to_end.py start them.

The model is stories260K (260,032 parameters, writes children's stories) in Hugging Face layout, which is not part of
this repository: a folder given by option, or the one beside it. Every run is two ranks of one thread under torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhfuse.errors import InputError
from rlhfuse.monitor.report.phase_times import whole_seconds

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "../shared/data/stories260K-hf"
RANKS = 2
RUN_SECONDS = 3600.0  # a hang; a busy machine needs minutes for what takes seconds
LOG_LINES = 20  # shown of a run that failed


def model_folder(given: str | None) -> Path:
    """The model's folder. Raises InputError when it is not there."""
    folder = Path(given or MODEL).resolve()
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} holds no model; give --model the Hugging Face folder of stories260K")
    return folder


def config_file(algorithm: str) -> Path:
    return ROOT / "examples" / f"stories_{algorithm}.yaml"


def train(config: Path, model: Path, out: Path, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run it into the folder `out`; metrics by iteration. Raises RuntimeError with what a failed run said."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    settings = [f"actor.path={model}", f"trainer.output_dir={out}", f"data.train_files=[{prompts_file()}]"]
    program = [str(ROOT / "tools" / "train_ppo.py"), "--config", str(config), *settings, *overrides]
    run_program_of([sys.executable, *launcher, *program], threads=1)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def prompts_file() -> Path:
    return ROOT / "examples" / "prompts" / "stories.jsonl"


def run_program_of(command: Sequence[str], threads: int) -> None:
    """Run to its end and leave no process behind. Raises RuntimeError with the end of what it said, if it failed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
        try:
            code = process.wait(RUN_SECONDS)
        finally:
            end_session(process)
        said.seek(0)
        if code:
            lines = "".join(said.readlines()[-LOG_LINES:])
            raise RuntimeError(f"{' '.join(command)} ended with code {code}:\n{lines}")


def end_session(process: subprocess.Popen) -> None:
    """Kill what is left of a process that was started in a session of its own, and of its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of it has ended
    process.wait()


def seconds_of(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds of each iteration, from its start to the start of the next."""
    return [whole_seconds(row) for row in rows]


def samples_of(out: Path, count: int) -> list[dict[str, Any]]:
    """The last `count` samples that the run kept as text: prompt, response, score."""
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()][-count:]
