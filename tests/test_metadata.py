"""What the built package says of itself."""

import configparser
import shutil
import subprocess
import sys
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """METADATA as pip would build it from pyproject.toml and setup.cfg, in a folder with nothing else."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "setup.cfg", "README.md"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "rlhfuse", folder / "rlhfuse", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, check=True, capture_output=True, text=True)
    made = folder / built.stdout.split()[-1]
    entries = (made / "entry_points.txt").read_text() if (made / "entry_points.txt").exists() else ""
    return message_from_string((made / "METADATA").read_text()), entries


@pytest.mark.parametrize(
    "package, extra",
    [
        ("torch", None),
        ("megatron-core", None),
        ("transformers", None),
        ("numba", None),
        ("mpi4py", "mpi"),
        ("flash-attn", "gpu"),
        ("pytest", "test"),
    ],
)
def test_the_packages_that_the_project_is_built_on_are_declared(metadata, package, extra):
    declared = [
        line
        for line in metadata[0].get_all("Requires-Dist")
        if line.split(";")[0].split("=")[0].split(">")[0].strip() == package
    ]
    assert len(declared) == 1
    marker = declared[0].partition(";")[2].replace('"', "'").strip()
    assert marker == (f"extra == '{extra}'" if extra else "")


def test_every_package_is_installed_and_nothing_else():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    declared = settings["options"]["packages"].split()
    there = [".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "rlhfuse").rglob("__init__.py")]
    assert sorted(declared) == sorted([*there, "rlhfuse.tools"])


def test_installed_programs_are_tools(metadata):
    entries = configparser.ConfigParser()
    entries.read_string(metadata[1])
    programs = dict(entries["console_scripts"])
    assert set(programs) == {f"rlhfuse-{name}" for name in ("train", "plan", "search", "calibrate", "report")}
    for entry in programs.values():
        module, _, function = entry.partition(":")
        assert f"def {function}(" in (ROOT / f"{module.replace('rlhfuse.tools.', 'tools/')}.py").read_text()
