"""Where the checkout is, and data that is not in it."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
NO_DATA = "needs data that is not in the repository; RLHFUSE_TEST_DATA names its folder where there is one"


def shared_data(name: str) -> Path:
    """The file or folder of that name in RLHFUSE_TEST_DATA; skips the test where that is not set."""
    folder = os.environ.get("RLHFUSE_TEST_DATA")
    if not folder:
        pytest.skip(NO_DATA)
    path = (ROOT / folder / name).resolve()
    assert path.exists(), f"RLHFUSE_TEST_DATA={folder} has no {name}"
    return path
