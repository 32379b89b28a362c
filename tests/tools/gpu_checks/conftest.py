"""scripts/gpu_check.sh without a GPU, and where its checks work."""

import json
import sys

import pytest
from gpu_checks.bench import Bench, References
from testkit import triton_interpreter  # noqa: F401
from testkit.paths import ROOT


@pytest.fixture
def call(programs):
    """scripts/gpu_check.sh: arguments -> its exit code and the object of the last line."""

    def call(*arguments: object, **variables: str) -> tuple[int, dict]:
        hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, **variables}
        done = programs.run("bash", ROOT / "scripts" / "gpu_check.sh", *arguments, **hidden)
        assert done.stdout.strip(), done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    return call


@pytest.fixture
def bench(tmp_path):
    return Bench("cpu", tmp_path, References(None))
