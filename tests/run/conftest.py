"""Whole runs that tests of this room ask for by name, and a process group of the test's own process."""

import pytest
import torch.distributed as dist
from testkit.runs_table import Runs


@pytest.fixture(scope="session")
def runs(pools, tmp_path_factory):
    return Runs(pools, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
