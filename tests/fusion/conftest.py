"""Four ranks for the distributed tests of a file."""

from __future__ import annotations

import pytest
from gloo import Workers


@pytest.fixture(scope="module")
def workers():
    pool = Workers(4)
    yield pool
    pool.close()
