"""Counts the storages that live, as the CUDA caching allocator does, and keeps what held them at the peak.

On the device in steps of 512 bytes. In host memory floats alone, which are as large as weights; page-locked blocks as
torch's host allocator takes them, rounded up to a power of two.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
DEVICE, HOST, PINNED = "device", "host", "pinned"
NOTE_BYTES = 16 << 20  # the table is taken anew only for a peak that is higher by this


@dataclass(slots=True)
class Block:
    """One storage that lives."""

    place: str
    asked: int  # bytes
    nbytes: int  # that were taken for them
    what: str  # operator, dtype and shape that made it
    phase: str  # in which


class Meter:
    """Bytes now and at the peak, by place. `phase` is what new storages belong to."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.phase = ""
        self._at_peak: Counter[tuple[str, str]] = Counter()
        self._noted = 0  # bytes of that table
        self._live: dict[int, Block] = {}

    def track(self, tensor: torch.Tensor, what: str, place: str) -> None:
        """Count the storage of a tensor while it lives."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = Block(place, 0, 0, f"{what} {str(tensor.dtype)[6:]} {list(tensor.shape)}", self.phase)
        weakref.finalize(storage, self._drop, key)
        self.resize(key, storage.nbytes())

    def resize(self, key: int, nbytes: int) -> None:
        """A storage has another size now; 0 is given back."""
        block = self._live.get(key)
        if block is None:
            return
        taken = rounded(nbytes, block.place)
        if taken < block.nbytes:
            self._note_peak()
        self.now[block.place] += taken - block.nbytes
        block.asked, block.nbytes = nbytes, taken
        self.peak[block.place] = max(self.peak[block.place], self.now[block.place])

    def pass_through(self, nbytes: int, what: str) -> None:
        """Device memory that a kernel takes and gives back before it returns."""
        self._note_peak()
        if self.now[DEVICE] + nbytes > self.peak[DEVICE]:
            self._noted = self.peak[DEVICE] = self.now[DEVICE] + nbytes
            self._at_peak = self.table() + Counter({(self.phase, what): nbytes})

    def watched(self, work: Callable[[], T]) -> tuple[T, int, int]:
        """What `work` gives, how much more was held on the device while it ran, and how much more now."""
        before, highest = self.now[DEVICE], self.peak[DEVICE]
        self.peak[DEVICE] = before
        try:
            out = work()
        finally:
            top, self.peak[DEVICE] = self.peak[DEVICE], max(highest, self.peak[DEVICE])
        return out, top - before, self.now[DEVICE] - before

    def holders(self) -> Counter[str]:
        """Bytes on the device by what made them."""
        rows: Counter[str] = Counter()
        for block in self._live.values():
            if block.place == DEVICE:
                rows[block.what] += block.nbytes
        return rows

    def name_of(self, tensor: torch.Tensor) -> str:
        """What made its storage."""
        return self._live[tensor.untyped_storage()._cdata].what

    def rename(self, tensor: torch.Tensor, what: str) -> None:
        """Its storage stands for what that made."""
        self._live[tensor.untyped_storage()._cdata].what = what

    def reset(self) -> None:
        """Begin to look for peaks anew."""
        self.peak = Counter(self.now)
        self._noted, self._at_peak = self.now[DEVICE], self.table()

    def at_peak(self) -> Counter[tuple[str, str]]:
        """Bytes on the device by (phase, what made them), when most were held since the last `reset`."""
        self._note_peak()
        return self._at_peak

    def table(self, place: str = DEVICE) -> Counter[tuple[str, str]]:
        """Bytes that live now by (phase, what made them)."""
        rows: Counter[tuple[str, str]] = Counter()
        for block in self._live.values():
            if block.place == place:
                rows[block.phase, block.what] += block.nbytes
        return rows

    @property
    def host_bytes(self) -> int:
        """In host memory, as large as it was asked for."""
        return sum(block.asked for block in self._live.values() if block.place != DEVICE)

    @property
    def reserved_bytes(self) -> int:
        """In host memory as allocators take it."""
        return self.now[HOST] + self.now[PINNED]

    def _drop(self, key: int) -> None:
        self._note_peak()
        if block := self._live.pop(key, None):
            self.now[block.place] -= block.nbytes

    def _note_peak(self) -> None:
        """Take the table if this is the peak: it is, where memory is about to be given back."""
        now = self.now[DEVICE]
        if now == self.peak[DEVICE] and now > self._noted + NOTE_BYTES:
            self._noted, self._at_peak = now, self.table()


def rounded(nbytes: int, place: str) -> int:
    """What an allocator takes for so many bytes."""
    if place == DEVICE:
        return -(-nbytes // 512) * 512
    return 1 << (nbytes - 1).bit_length() if place == PINNED and nbytes else nbytes
