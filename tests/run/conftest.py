"""Whole runs that tests of this room ask for by name."""

import pytest
from testkit.runs_table import Runs


@pytest.fixture(scope="session")
def runs(pools, tmp_path_factory):
    return Runs(pools, tmp_path_factory.mktemp("runs"))
