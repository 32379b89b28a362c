"""What a launcher, such as torchrun, says of the job in the environment of its processes."""

from __future__ import annotations

import os

from rlhfuse.base.errors import InputError


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
