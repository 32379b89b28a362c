"""Hardware queues for CUDA streams: enough by default, and too few refused before anything can deadlock."""

from __future__ import annotations

import os
import warnings

import pytest

from rlhfuse.base.cuda_environment import set_cuda_environment
from rlhfuse.base.errors import InputError
from rlhfuse.parallel.device import QUEUES, give_streams_queues


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What a program sets before torch is imported; restored afterwards."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    set_cuda_environment(os.environ)


def test_every_stream_gets_a_queue_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv(QUEUES)
    with pytest.warns(UserWarning, match=f"{QUEUES}.* set after torch was imported, too late if CUDA has started"):
        give_streams_queues()
    assert os.environ[QUEUES] == "32"
    monkeypatch.setenv(QUEUES, "8")
    with warnings.catch_warnings(action="error"):  # what was set in time is not spoken of
        give_streams_queues()
    assert os.environ[QUEUES] == "8"


@pytest.mark.parametrize("value", ["1", "7", "many"])
def test_too_few_queues_are_refused(monkeypatch, value):
    monkeypatch.setenv(QUEUES, value)
    with pytest.raises(InputError, match=f"{QUEUES}={value} .*unset it"):
        give_streams_queues()
