"""Checkpoints that several tests of fusion/ train."""

import pytest
from testkit.training_pair import write_pair


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("models"))
