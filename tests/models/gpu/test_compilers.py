"""The kernels under the compilers of all torch versions that are supported, not just the one that is installed."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TESTS = Path(__file__).resolve().parents[2]
COMPILERS = {"3.6.0": "2.11", "3.7.0": "2.12.0", "3.7.1": "2.12.1 and 2.13"}  # triton: the torch that pins it


@pytest.mark.parametrize("version", COMPILERS)
def test_kernels_pass_under_the_compiler_of_each_torch(version, tmp_path):
    if importlib.metadata.version("triton") == version:
        pytest.skip(f"triton {version} is installed: the tests of each kernel compile with it")
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), f"triton=={version}"]
    got = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"triton {version} cannot be had: {got.stderr.strip().splitlines()[-1]}")
    files = [file for file in sorted(TESTS.rglob("test_*.py")) if "compiled_launches(" in file.read_text()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "compile", "-m", "not slow"]
    done = subprocess.run(
        [sys.executable, *words, *map(str, files)], env=environment, cwd=TESTS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, f"triton {version}, of torch {COMPILERS[version]}:\n{done.stdout[-4000:]}"
