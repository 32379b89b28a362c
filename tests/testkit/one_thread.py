"""A fixture for conftest files: the tests below them run on one thread."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Exactness is promised for one thread; and two, on a busy machine, wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
