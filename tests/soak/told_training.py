"""tools/train_ppo.py, where rank 0 writes what it tells its watchdog into the file that RLHFUSE_DOING names."""

import os
import re

import train_ppo
from program import prints_error, run_program

from rlhfuse.monitor.watchdog import Watchdog

WIDTH = 200  # bytes of the file
BEGINS = r"(?:evaluation after )?iteration (-?\d+): "


def main() -> int:
    progress, file, began = Watchdog.progress, os.open(os.environ["RLHFUSE_DOING"], os.O_WRONLY), ""

    def told(self: Watchdog, doing: str) -> None:
        nonlocal began
        found = re.match(BEGINS, doing)
        began = found[0] if found else began
        os.pwrite(file, (began + doing.removeprefix(began)).encode()[:WIDTH].ljust(WIDTH), 0)
        progress(self, doing)

    if os.environ["RANK"] == "0":
        Watchdog.progress = told
    return train_ppo.main()


if __name__ == "__main__":
    run_program(main, tear_down=False, prints=prints_error)
