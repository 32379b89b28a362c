"""Planning compiles its kernels in other processes, so that the one that plans gives the compiler's memory back."""

import pytest

CODE = """
from numba.core import event
from rlhfuse.config.load import load_config
from rlhfuse.run.preflight import check_inputs

with event.install_recorder("numba:compile") as compiled:
    check_inputs(load_config("examples/quickstart.yaml", ["fusion.search_seconds=0.2"]), 4)
print(*(data.data["dispatcher"].py_func.__name__ for _, data in compiled.buffer))
"""


@pytest.mark.slow
def test_nothing_is_left_to_compile(programs, tmp_path):
    """In a process of its own, with a cache that is empty at first."""
    done = programs.python("-c", CODE, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "\n"
    assert "compiled" in done.stderr
