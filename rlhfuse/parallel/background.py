"""Work beside the rank's own, in a thread, and on a GPU in a stream of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlhfuse.base.clock import Clock


class Background:
    """One piece of work, which begins at once, on a GPU behind all that was launched before.

    Whoever needs its end calls `wait`, which raises what the work raised.
    """

    def __init__(self, work: Callable[[], None], name: str, device: torch.device, clock: Clock) -> None:
        self._failure: BaseException | None = None
        self._work, self._device = work, device
        self._launched = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._thread = clock.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until the work is done, on a GPU too."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        stream = None
        try:
            if self._launched is not None:
                torch.cuda.set_device(self._device)  # a new thread begins on GPU 0
                stream = torch.cuda.Stream(self._device)
                stream.wait_event(self._launched)
            with torch.no_grad(), torch.cuda.stream(stream):
                self._work()
            if stream is not None:
                stream.synchronize()
        except BaseException as failure:  # raised by the thread that waits
            self._failure = failure
