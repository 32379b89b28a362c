"""Signals that end a search."""

import os
import signal

import pytest
from stop_signals import StopSignals


def test_signals_are_remembered_and_a_second_ctrl_c_insists():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # the batch system and mpirun both
            assert signals.received == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received == 0
    finally:
        signal.signal(signal.SIGINT, before)
