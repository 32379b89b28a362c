"""What one rank tells the others about itself, and whether its process still runs.

A `Heartbeat` is a line of JSON in the job's key-value store. `counter` grows with every beat of the watchdog's
thread, `progress` with every report of the main thread. A process is named by its host (with boot and process
namespace, so that equal pids are never mistaken), pid and start time. Knows no store and takes no decision.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

RUNNING, DONE, TERMINATED, INTERRUPTED, FAILED, LEFT = "running", "done", "terminated", "interrupted", "failed", "left"


@dataclass(frozen=True)
class ProcessName:
    """A process, unique over hosts, boots and reuse of pids."""

    host: str
    machine: str  # boot and process namespace: only within one can a pid be looked up
    pid: int
    started: str  # the kernel's start time, "" where there is no /proc

    @staticmethod
    def own() -> ProcessName:
        pid = os.getpid()
        status = _process_status(pid)
        return ProcessName(socket.gethostname(), _machine(), pid, status[1] if status else "")

    def is_gone(self, machine: str) -> bool:
        """Whether the process is known to have ended; never true of a process on another machine."""
        if self.machine != machine:
            return False
        if not self.started:
            return not _pid_exists(self.pid)
        status = _process_status(self.pid)
        return status is None or status[0] in "ZX" or status[1] != self.started


@dataclass(frozen=True)
class Heartbeat:
    """The latest word of one rank. `because` says why it failed or left."""

    rank: int
    process: ProcessName
    counter: int
    progress: int
    doing: str
    state: str = RUNNING
    because: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(data: str | bytes) -> Heartbeat:
        raw = json.loads(data)
        return Heartbeat(**{**raw, "process": ProcessName(**raw["process"])})

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.process.pid} on {self.process.host})"


def _machine() -> str:
    """Host, boot and process namespace; the last two are empty where there is no /proc."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    parts = [socket.gethostname()]
    parts.append(boot.read_text().strip() if boot.exists() else "")
    parts.append(os.readlink(namespace) if namespace.is_symlink() else "")
    return " ".join(parts)


def _process_status(pid: int) -> tuple[str, str] | None:
    """(state letter, start time) from /proc/PID/stat, or None when there is no such process (or no /proc)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    after_name = text.rpartition(")")[2].split()  # the name may hold spaces and brackets
    return after_name[0], after_name[19]


def _pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
