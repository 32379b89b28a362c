"""One SLURM for all tests of this folder, without jobs at the beginning of each."""

import pytest
from testkit.programs import Programs
from testkit.slurm import Slurm
from testkit.slurm import slurm as made


@pytest.fixture(scope="session")
def cluster():
    own = Programs()  # what a test leaves running is ended, and this is not
    with made(own) as slurm:
        yield slurm


@pytest.fixture
def slurm(programs, cluster: Slurm):
    yield cluster
    cluster.cancel_all()
