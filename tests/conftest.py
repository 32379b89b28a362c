"""Shared by all tests: the helpers beside this file, and quiet Megatron imports."""

import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|transformer_engine).*")

import pytest  # noqa: E402
from gloo import Workers  # noqa: E402


@pytest.fixture(scope="module")
def workers():
    """Four ranks for the distributed tests of a file."""
    pool = Workers(4)
    yield pool
    pool.close()
