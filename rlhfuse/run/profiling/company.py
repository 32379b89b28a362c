"""What the other instances do while one is measured: nothing, decode, or score.

The measured instance's leader writes an order to the store; the leader of every other instance looks for the next
order between two units of its work, and says that it is there once it has done a first unit. Ranks of an instance
follow their leader, so that all make the same calls.

Knows nothing of what is measured.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

STOP = "stop"
IDLE_SECONDS = 0.002  # between two looks while idle


class Company:
    """One rank's part. Instance 0 gives orders (`become`), all others `keep` them until STOP."""

    def __init__(
        self,
        store: dist.Store,
        instance: int,
        others: int,
        tp_group: dist.ProcessGroup,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self._store, self._instance, self._others = store, instance, others
        self._group, self._device = tp_group, device
        self._leads = dist.get_rank(tp_group) == 0
        self._timeout = timeout_seconds
        self._order = 0

    def become(self, activity: str) -> None:
        """Instance 0: have the others do `activity`; returns when all of them do. Raises TimeoutError."""
        self._order += 1
        if self._leads and self._others:
            self._store.set(f"order/{self._order}", activity)
            began = time.monotonic()
            while activity != STOP and self._store.add(f"there/{self._order}", 0) < self._others:
                if time.monotonic() - began > self._timeout:
                    raise TimeoutError(f"not all of {self._others} instances began {activity} in {self._timeout} s")
                time.sleep(IDLE_SECONDS)
        self.agree(0)

    def keep(self, activities: Mapping[str, Callable[[], None]]) -> None:
        """Another instance: run units of what is ordered until STOP. Raises TimeoutError without an order."""
        activity = self._wait_for_order()
        while activity != STOP:
            activities[activity]()
            if self._leads:
                self._store.add(f"there/{self._order}", 1)
            while not self._next_is_there():
                activities[activity]()
            activity = self._wait_for_order()

    def agree(self, value: int) -> int:
        """The leader's value, on every rank of the instance."""
        if dist.get_world_size(self._group) == 1:
            return value
        told = torch.tensor([value if self._leads else 0], device=self._device)
        dist.all_reduce(told, group=self._group)
        return int(told)

    def _next_is_there(self) -> bool:
        return bool(self.agree(int(self._leads and self._store.check([f"order/{self._order + 1}"]))))

    def _wait_for_order(self) -> str:
        self._order += 1
        key = f"order/{self._order}"
        self._store.wait([key], datetime.timedelta(seconds=self._timeout))
        return self._store.get(key).decode()
