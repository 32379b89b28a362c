"""Four ranks for the distributed tests of a file."""

from __future__ import annotations

import pytest
from gloo import Workers


@pytest.fixture(scope="module")
def workers():
    pool = Workers(4, timeout_seconds=300.0)  # a hang; a machine with other work needs a minute
    yield pool
    pool.close()
