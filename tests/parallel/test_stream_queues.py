"""Hardware queues for CUDA streams: enough by default, and too few refused before anything can deadlock."""

from __future__ import annotations

import os

import pytest

from rlhfuse.base.errors import InputError
from rlhfuse.parallel.device import QUEUES, give_streams_queues


def test_every_stream_gets_a_queue_unless_told_otherwise(monkeypatch):
    monkeypatch.setenv(QUEUES, "")  # so that the variable is restored afterwards
    monkeypatch.delenv(QUEUES)
    give_streams_queues()
    assert os.environ[QUEUES] == "32"
    monkeypatch.setenv(QUEUES, "8")
    give_streams_queues()
    assert os.environ[QUEUES] == "8"


@pytest.mark.parametrize("value", ["1", "7", "many"])
def test_too_few_queues_are_refused(monkeypatch, value):
    monkeypatch.setenv(QUEUES, value)
    with pytest.raises(InputError, match=f"{QUEUES}={value} .*unset it"):
        give_streams_queues()
