"""What a launcher, such as torchrun, says of the job in the environment of its processes."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from rlhfuse.base.errors import InputError

PATIENCE_SECONDS = "30"  # torchrun's with ranks that it has told to end


def local_rank() -> int:
    """Number of this process on its node; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def ranks_per_node() -> int | None:
    """Ranks of this job on a node; None without a launcher. Plans ask for it, too: theirs is the job's node.

    Raises InputError for what is no number of ranks.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if text and not (text.isdecimal() and int(text) > 0):
        raise InputError(f"LOCAL_WORLD_SIZE={text!r} is no number of ranks; unset it or give 1 or more")
    return int(text) if text else None


def launcher_command() -> list[str]:
    """The command line of torchrun, which has started this process; of none without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []
    return Path(f"/proc/{os.getppid()}/cmdline").read_text().rstrip("\0").split("\0")


def patience_seconds() -> float:
    """How long torchrun lets a rank live after it has handed it a signal; without torchrun infinite."""
    if not (words := launcher_command()):
        return math.inf
    given = re.search(r"\s--shutdown[-_]timeout[=\s](\d+)\s", f" {' '.join(words)} ")
    return float(given[1] if given else os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", PATIENCE_SECONDS))
