"""How fast an engine prefills, learned from its own steps.

The median over recent steps that mostly prefilled: one slow step (first use of a kernel, a busy machine) does not
count. Decoding sequences of the same step are charged to the prefill, so the rate errs to the slow side.
"""

from __future__ import annotations

import json
from collections import deque
from statistics import median

import torch.distributed as dist

from rlhfuse.errors import InputError
from rlhfuse.parallel.collectives import all_gather_bytes

RECENT_STEPS = 32


class PrefillRate:
    def __init__(self) -> None:
        self._seconds_per_token: deque[float] = deque(maxlen=RECENT_STEPS)

    def observe(self, prefill_tokens: int, batch: int, seconds: float) -> None:
        """Take a step in; one that did not run more prefill tokens than sequences is left out."""
        if prefill_tokens > batch:
            self._seconds_per_token.append(seconds / prefill_tokens)

    def agreed_seconds_per_token(self, group: dist.ProcessGroup | None) -> float:
        """With a group a collective, which gives all its ranks what the first one learned.

        Raises InputError before the first step that counts.
        """
        seconds = median(self._seconds_per_token) if self._seconds_per_token else None
        if group is not None:
            seconds = json.loads(all_gather_bytes(json.dumps(seconds).encode(), group)[0])
        if seconds is None:
            raise InputError("no step has prefilled yet, so its speed is not known; give prefill_seconds_per_token")
        return seconds
