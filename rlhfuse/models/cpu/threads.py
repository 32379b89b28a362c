"""How many threads the parallel numba kernels use: as many as torch."""

from __future__ import annotations

import numba
import torch


def share_threads() -> int:
    """Give the kernels torch's number of threads, as far as the machine has them; returns it. Call before a kernel.

    numba's OpenMP pool sets the thread count of the whole process when it starts: torch's is put back.
    """
    count = torch.get_num_threads()
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return numba.get_num_threads()
