"""A binary heap in two arrays, for numba: smallest (key, item) first."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def push(keys: np.ndarray, items: np.ndarray, count: int, key: float, item: int) -> int:
    """Insert into the heap of `count` entries; returns the new count."""
    i = count
    while i > 0:
        parent = (i - 1) >> 1
        if keys[parent] < key or (keys[parent] == key and items[parent] <= item):
            break
        keys[i], items[i] = keys[parent], items[parent]
        i = parent
    keys[i], items[i] = key, item
    return count + 1


@njit(cache=True)
def drop(keys: np.ndarray, items: np.ndarray, count: int) -> int:
    """Remove the smallest of `count` entries (read it at index 0 before); returns the new count."""
    last = count - 1
    key, item = keys[last], items[last]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        other = child + 1
        if other < last and (keys[other] < keys[child] or (keys[other] == keys[child] and items[other] < items[child])):
            child = other
        if keys[child] > key or (keys[child] == key and items[child] >= item):
            break
        keys[i], items[i] = keys[child], items[child]
        i = child
    keys[i], items[i] = key, item
    return last
