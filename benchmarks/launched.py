"""Ends what a benchmark started under torchrun or mpirun, in a session of its own."""

from __future__ import annotations

import os
import signal
import subprocess

END_SECONDS = 20.0


def end(process: subprocess.Popen) -> None:
    """Ask the launcher, which asks its ranks; kill the session if that takes too long."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
