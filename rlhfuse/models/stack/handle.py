"""A Triton kernel that is launched without Triton's look at every argument, which takes longer than the launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.runtime import driver

ALIGNMENT = 16  # bytes; Triton compiles for addresses that are multiples, and for others


class Handle:
    """A kernel whose last arguments are `constants`, of which `num_warps` is none.

    What the first launch has compiled serves the others. It is for aligned addresses; torch's allocations are, and of
    the first `given` arguments, which may be parts of something, each launch looks at the address and the dtype: where
    they are others, Triton launches. Raises TypeError where an integer that may change would be compiled in.
    """

    def __init__(self, kernel: Any, given: int, *, num_warps: int = 4, **constants: Any) -> None:
        self._kernel, self._given, self._options = kernel, given, constants | {"num_warps": num_warps}
        self._constants = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._run: Any = None

    def __call__(self, x: int, y: int, *arguments: Any) -> None:
        """Launch a grid of x times y on the current stream of this thread."""
        if self._run is not None:
            for tensor in arguments[: self._given]:
                if tensor.data_ptr() % ALIGNMENT or tensor.dtype is not self._dtype:
                    break
            else:
                stream = self._stream(self._device)
                self._run(x, y, 1, stream, *self._kernel_words, None, None, None, *arguments, *self._constants)
                return
        compiled = self._kernel[x, y](*arguments, **self._options)
        if self._run is None and compiled is not None and self._serves(arguments):  # None: interpreted
            active: Any = driver.active
            self._device, self._stream = active.get_current_device(), active.get_current_stream
            self._dtype, self._kernel_words = arguments[0].dtype, (compiled.function, compiled.packed_metadata)
            self._run = compiled.run

    def _serves(self, arguments: tuple[Any, ...]) -> bool:
        """True if the kernel compiled for these arguments is valid for all later ones."""
        aligned = True
        for param, value in zip(self._kernel.params, arguments):
            if isinstance(value, int) and not param.do_not_specialize:
                raise TypeError(f"{self._kernel.__name__} must not specialize on {param.name}")
            if isinstance(value, Tensor) and not param.do_not_specialize_on_alignment:
                aligned &= value.data_ptr() % ALIGNMENT == 0
        return aligned and len({tensor.dtype for tensor in arguments[: self._given]}) == 1
