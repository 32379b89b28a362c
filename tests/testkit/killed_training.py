"""tools/train_ppo.py that is killed, or meets a full disk, at one moment; everything else is the program.

    KILL_AT="RANK WHO COUNT REGEX"    when rank RANK says the COUNT-th text that REGEX finds

WHO dies: one, or all with torchrun; or "full": nobody, but the disk of the folder FULL_DISK has no byte left. Nor at
"notice", a SIGUSR1 to all ranks, "stuck", where this one does no more after it, and "late", the end of its time. Texts
are what a rank tells its watchdog, and in the thread that saves "file begins", "file written" (of this rank), "commit
begins", "commit ends" (of the checkpoint, on rank 0). Before each stands "start+K, iteration N: ", where K iterations
came before it since the start.
"""

import errno
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import train_ppo
from program import prints_error, run_program

from rlhfuse.monitor.watchdog import Watchdog
from rlhfuse.run.checkpoint import writer as checkpoint_writer
from rlhfuse.run.checkpoint.writer import CheckpointWriter


class Killer:
    """Counts down to the moment."""

    def __init__(self, rank: str, who: str, count: str, regex: str) -> None:
        self.armed = os.environ["RANK"] == rank
        self.who, self.left, self.regex = who, int(count), re.compile(regex)
        self.iteration, self.first = "", 0
        self.lock = threading.Lock()
        self.guard: Any = None

    def hear(self, text: str) -> None:
        if found := re.match(r"iteration (\d+): ", text):
            number = int(found[1])
            self.first = self.first if self.iteration else number
            self.iteration = f"start+{number - self.first}, iteration {number}: "
            text = text.removeprefix(found[0])
        text = self.iteration + text
        with self.lock:
            self.left -= self.armed and self.regex.search(text) is not None
            if self.armed and self.left == 0:
                self.armed = False
                print(f"killed in: {text}", flush=True)
                self.kill()

    def kill(self) -> None:
        if self.who == "full":
            fill(Path(os.environ["FULL_DISK"]) / "ballast")
            return
        if self.who == "late":
            self.guard._deadline = time.monotonic()
            return
        if self.who in ("notice", "stuck"):
            for rank in psutil.Process(os.getppid()).children():  # as torchrun hands it on
                os.kill(rank.pid, signal.SIGUSR1)
            while self.who == "stuck":
                time.sleep(1)
            return
        if self.who == "all":
            launcher = psutil.Process(os.getppid())
            both = [] if "multiprocessing.forkserver" in " ".join(launcher.cmdline()) else [launcher]
            for one in [*both, *launcher.children()]:
                if one.pid != os.getpid():
                    one.kill()
        os.kill(os.getpid(), signal.SIGKILL)


def fill(ballast: Path) -> None:
    """Write until the disk is full to the last byte."""
    with open(ballast, "ab", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def main() -> int:
    killer = Killer(*os.environ["KILL_AT"].split(" ", 3))
    progress = Watchdog.progress

    def heard_progress(self, doing):
        killer.guard = self.guard
        killer.hear(doing)
        progress(self, doing)

    def heard(call, before: str, after: str):
        def called(*arguments):
            killer.hear(before)
            result = call(*arguments)
            killer.hear(after)
            return result

        return called

    Watchdog.progress = heard_progress
    CheckpointWriter._commit = heard(CheckpointWriter._commit, "commit begins", "commit ends")
    checkpoint_writer.write_rank_file = heard(checkpoint_writer.write_rank_file, "file begins", "file written")
    return train_ppo.main()


if __name__ == "__main__":
    run_program(main, tear_down=False, prints=prints_error)
