"""The two commands of README in a newcomer's order, from nothing. Needs the network: torch's wheel and the others."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("python3.13", "python3.12", "python3.10")  # rather than the one that runs the tests


def python() -> str:
    """One that runs: pyenv's shims are there for versions that are not chosen, too."""
    found = (shutil.which(name) for name in NAMES)
    return next(
        (name for name in found if name and not subprocess.run([name, "-V"], capture_output=True).returncode),
        sys.executable,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_fresh_checkout_trains_and_then_passes_its_tests():
    with tempfile.TemporaryDirectory() as folder:  # some GB, not to be kept
        checkout = Path(folder, "rlhfuse")
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, files.split("\0")):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)
        chosen = ("PYTHONPATH", "RLHFUSE_VENV", "TORCH_INDEX", "TORCH_VERSION", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in chosen} | {"PYTHON": python()}
        for script, *arguments in (
            ("quickstart.sh", "trainer.iterations=2", "trainer.output_dir=runs/first"),
            ("test.sh", "tests/base", "tests/config", "tests/test_metadata.py"),
        ):
            command = ["bash", f"scripts/{script}", *arguments]
            told = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
            assert told.returncode == 0, f"{told.stdout[-4000:]}\n{told.stderr[-4000:]}"
        assert len((checkout / "runs/first/metrics.jsonl").read_text().splitlines()) == 2
