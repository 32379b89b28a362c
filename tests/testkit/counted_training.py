"""tools/train_ppo.py whose first rank on a machine notes, as an iteration begins, what the machine has sent so far.

COUNTED=FILE    of machine M a line "iteration bytes packets" for each in FILE.M, as the kernel counts at eth0
"""

import os
import re
from pathlib import Path

import train_ppo
from program import prints_error, run_program

from rlhfuse.monitor.watchdog import Watchdog
from testkit.machines import INTERFACE


def sent() -> tuple[int, int]:
    """Bytes and packets."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if f"{INTERFACE}:" in line)
    numbers = line.partition(":")[2].split()
    return int(numbers[8]), int(numbers[9])


def main() -> int:
    progress, first = Watchdog.progress, os.environ["LOCAL_RANK"] == "0"

    def noted(self: Watchdog, doing: str) -> None:
        if first and (found := re.fullmatch(r"iteration (\d+): actor_move.*", doing)):
            with open(f"{os.environ['COUNTED']}.{os.environ['GROUP_RANK']}", "a") as file:
                print(found[1], *sent(), file=file)
        progress(self, doing)

    Watchdog.progress = noted
    return train_ppo.main()


if __name__ == "__main__":
    run_program(main, tear_down=False, prints=prints_error)
