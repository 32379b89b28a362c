"""Which rank prints an error that others may meet as well: one of them, over the launcher's store.

That store is there before any process group. torch loads only once there is an error.
"""

from __future__ import annotations

import datetime
import os
import socket
import time

STORE_PATIENCE = datetime.timedelta(seconds=10)


def prints_error(what: str, seconds: float) -> bool:
    """Whether this rank, under torchrun, is to print of `what`: rank 0 if it meets it, else whoever asks first.

    Other ranks wait so many seconds for rank 0. True where there is no store to ask.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # torch's __all__ lacks it

    key = f"error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{what}"
    until = time.monotonic() + (0.0 if os.environ["RANK"] == "0" else seconds)
    try:
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)  # first: for a name that nobody knows the store waits
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=STORE_PATIENCE)
        while time.monotonic() < until:
            if store.check([key]):
                return False
            time.sleep(0.05)
        return store.add(key, 1) == 1
    except (KeyError, ValueError, OSError, RuntimeError):
        return True
