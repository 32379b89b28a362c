"""Draws with given options, for tests."""

import numpy as np

from rlhfuse.gen.core.draws import DrawBatch

OFF = dict(temperature=1.0, top_k=0, top_p=1.0, banned=(), seed=0)


def noise_key(seed: int, sample_id: int, position: int) -> tuple[int, int]:
    """What a key means: three rounds of splitmix64 over (seed, sample id, position)."""
    state = 0
    for word in (seed, sample_id, position):
        state = (state ^ (word % 2**64)) + 0x9E3779B97F4A7C15
        state %= 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state % 2**32, state >> 32


def draw_batch(rows: list[dict], first_position: int = 0) -> DrawBatch:
    """Row r: sample 3 at position first_position + r, with options over OFF."""
    rows = [OFF | row for row in rows]
    banned = np.full((len(rows), max(len(row["banned"]) for row in rows)), -1)
    for number, row in enumerate(rows):
        banned[number, : len(row["banned"])] = row["banned"]
    return DrawBatch(
        np.array([noise_key(row["seed"], 3, first_position + r) for r, row in enumerate(rows)], np.uint32),
        np.array([row["temperature"] for row in rows], np.float32),
        np.array([row["top_k"] for row in rows]),
        np.array([row["top_p"] for row in rows], np.float64),
        banned,
    )
