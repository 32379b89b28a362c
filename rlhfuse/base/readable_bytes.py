"""A number of bytes for people."""

from __future__ import annotations


def readable_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.{3 if abs(count) < 999.5 else 4}g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
