"""What scripts/setup.sh asks pip for, and the two commands of README in a newcomer's order, from nothing."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from testkit.paths import ROOT

pytestmark = pytest.mark.usefixtures("programs")
NAMES = ("python3.12", "python3.13", "python3.10")  # rather than the one that runs the tests


def python() -> str:
    """One that runs; pyenv's shims are on PATH for versions that are not chosen, too."""
    beside = [str(file) for name in NAMES for file in Path.home().glob(f".pyenv/versions/{name[6:]}.*/bin/{name}")]
    for name in filter(None, [*map(shutil.which, NAMES), *beside]):
        if subprocess.run([name, "-V"], capture_output=True).returncode == 0:
            return name
    return sys.executable


INTERPRETER = """#!/usr/bin/env bash
case "$*" in
    "-m pip"*) echo "${@:3}" >>"$PIP_LOG" ;;
    *version*torch*) [ -n "$TORCH_HERE" ] && echo "$TORCH_HERE" ;;
    *triton*) false ;;
    *compileall*) ;;
    *) exec "$REAL" "$@" ;;
esac
"""


class Machine:
    """A checkout with scripts/setup.sh, and an environment whose pip only tells what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "pip.log"
        (folder / "scripts").mkdir()
        for name in ("setup.cfg", "pyproject.toml", "scripts/setup.sh"):
            shutil.copy(ROOT / name, folder / name)

    def environment(self, name: str) -> str:
        (self.folder / name / "bin").mkdir(parents=True)
        (self.folder / name / "bin/python").write_text(INTERPRETER)
        (self.folder / name / "bin/python").chmod(0o755)
        return name

    def setup(self, argument: str = "", torch: str = "", **variables: str) -> list[str]:
        """What pip was asked for by one `setup`, in an environment that has this torch."""
        self.log.write_text("")
        variables = {"PIP_LOG": str(self.log), "TORCH_HERE": torch, "REAL": sys.executable, **variables}
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        command = ["bash", "-euc", f". scripts/setup.sh; setup {argument}; echo $PATH"]
        told = subprocess.run(command, cwd=self.folder, env=kept | variables, capture_output=True, text=True)
        self.path, self.error, self.code = told.stdout, told.stderr, told.returncode
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


ALL = "install --no-compile torch==2.13.0 -e .[mpi]"


def test_everything_is_installed_once_and_the_tests_needs_when_they_are_asked_for(machine):
    machine.environment(".venv")
    assert machine.setup() == [ALL] and machine.path.splitlines()[-1].startswith(str(machine.folder / ".venv/bin"))
    assert machine.setup(torch="2.13.0") == []
    asked = machine.setup("test", torch="2.13.0+cpu")
    assert asked == [ALL.replace("[mpi]", "[mpi,test]"), "install --no-compile triton>=3.6,<3.8"]
    assert machine.setup(torch="2.13.0+cpu") == [] == machine.setup("test", torch="2.13.0+cpu")
    assert machine.setup("test", TORCH_VERSION="2.12.1")[0].startswith("install --no-compile torch==2.12.1 -e")


def test_an_index_is_for_torch_alone_and_is_remembered(machine):
    machine.environment(".venv")
    index = "install --no-compile --index-url https://one torch==2.13.0"
    assert machine.setup(TORCH_INDEX="https://one") == [index, ALL]
    assert machine.setup(torch="2.13.0+cpu") == [] == machine.setup(torch="2.13.0+cpu", TORCH_INDEX="https://one")
    assert machine.setup("test", torch="2.13.0+cpu")[0] == index, "the same torch: pip has nothing to do"
    other = machine.setup(torch="2.13.0+cpu", TORCH_INDEX="https://other")
    assert other[0] == "install --no-compile --force-reinstall --index-url https://other torch==2.13.0"


def test_an_environment_of_ones_own_keeps_its_torch(machine):
    there = machine.environment("conda")
    asked = machine.setup(torch="2.12.1+cu128", RLHFUSE_VENV=there, TORCH_INDEX="https://one")
    assert asked == [ALL.replace("2.13.0", "2.12.1+cu128")]
    assert not (machine.folder / ".venv").exists()
    assert machine.setup(torch="", RLHFUSE_VENV=machine.environment("bare")) == [ALL]


def test_an_environment_that_is_not_there_is_refused(machine):
    assert machine.setup(RLHFUSE_VENV="nowhere") == [] and machine.code == 2
    assert machine.error.startswith("error: nowhere has no Python from 3.10 to 3.13 in bin/; set RLHFUSE_VENV to")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_fresh_checkout_trains_and_then_passes_its_tests():
    """Needs the network: torch and the other wheels come from the public index, some GB."""
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
