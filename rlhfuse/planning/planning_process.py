"""Rank 0's side of planning, which happens in a process of its own (child.py)."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from typing import Any

from rlhfuse.base.launcher import end_with_parent, module_command
from rlhfuse.planning.job import Job
from rlhfuse.planning.plan import Plan


class PlanningProcess:
    """Plans in a child process, which imports what planning needs while this one reads the inputs of the run."""

    def __init__(self) -> None:
        self._requests, other = Pipe()
        command = module_command("rlhfuse.planning.child", str(other.fileno()))
        ends = partial(end_with_parent, os.getpid())
        self._child = subprocess.Popen(command, pass_fds=(other.fileno(),), preexec_fn=ends)
        other.close()

    def check(self, job: Job) -> None:
        self._ask("check", job)

    def plan(self, job: Job) -> Plan:
        text, costs = self._ask("plan", job)
        return replace(Plan.parse(text), costs=costs)

    def close(self) -> None:
        """End the child, whatever it does."""
        self._requests.close()
        self._child.kill()
        self._child.wait()

    def _ask(self, what: str, job: Job) -> Any:
        """The child's answer. Raises the InputError that planning ended with, or RuntimeError for a child that died."""
        with suppress(BrokenPipeError):  # what it left is read below
            self._requests.send((what, job))
        try:
            answer = self._requests.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"the planning process ended with exit code {self._child.wait()}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer
