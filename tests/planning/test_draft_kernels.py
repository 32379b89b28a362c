"""What `compile_for_drafts` has compiled leaves the ranks nothing to compile."""

import pytest

CODE = """
from numba.core import event
from rlhfuse.config.load import load_config
from rlhfuse.costs.layout_moves import layout_moves
from rlhfuse.planning.draft_kernels import compile_for_drafts
from rlhfuse.run.preflight import check_inputs

compile_for_drafts()
with event.install_recorder("numba:compile") as compiled:
    draft = check_inputs(load_config("examples/quickstart.yaml"), 4).draft
    assert layout_moves(draft.tasks, draft.ranks, draft.specs, 4, draft.inputs.hardware)
print(*(data.data["dispatcher"].py_func.__name__ for _, data in compiled.buffer))
"""


@pytest.mark.slow
def test_nothing_is_left_to_compile(programs, tmp_path):
    """In a process of its own, with a cache that is empty at first."""
    done = programs.python("-c", CODE, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "\n"
    assert "compiled 6 kernels" in done.stderr
