"""What a launcher, such as torchrun, says of the job in the environment of its processes."""

from __future__ import annotations

import os


def local_rank() -> int:
    """Number of this process on its node; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def ranks_per_node() -> int | None:
    """Ranks of this job on a node; None without a launcher. Plans ask for it, too: theirs is the job's node."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text else None
