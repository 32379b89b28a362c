"""Shared by all tests: the helpers beside this file, and quiet Megatron imports."""

import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on CPU tensors; read when a kernel is defined
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|transformer_engine).*")

import pytest  # noqa: E402
from gloo import Workers  # noqa: E402


@pytest.fixture(scope="module")
def workers():
    """Four ranks for the distributed tests of a file."""
    pool = Workers(4)
    yield pool
    pool.close()
