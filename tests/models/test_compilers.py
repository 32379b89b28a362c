"""The kernels under the compilers of all torch versions that are supported, not just the one that is installed."""

import importlib.metadata
import os

import pytest
from testkit.paths import TESTS

pytestmark = pytest.mark.slow
COMPILERS = {"3.6.0": "2.11", "3.7.0": "2.12.0", "3.7.1": "2.12.1 and 2.13"}  # triton: the torch that pins it


@pytest.mark.parametrize("version", COMPILERS)
def test_kernels_pass_under_the_compiler_of_each_torch(programs, version, tmp_path):
    if importlib.metadata.version("triton") == version:
        pytest.skip(f"triton {version} is installed: the tests of each kernel compile with it")
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, f"triton=={version}"]
    if (got := programs.python(*words)).returncode:
        pytest.skip(f"triton {version} cannot be had: {got.stderr.strip().splitlines()[-1]}")
    files = [file for file in sorted(TESTS.rglob("test_*.py")) if "= compiled_launches(" in file.read_text()]
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "compile", "-m", "not slow"]
    done = programs.python(*words, *files, PYTHONPATH=paths)
    assert done.returncode == 0, f"triton {version}, of torch {COMPILERS[version]}:\n{done.stdout[-4000:]}"
