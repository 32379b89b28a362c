"""Import this in tests that run Triton kernels: it mends what the interpreter of Triton 3.6 gets wrong.

Loops over loaded bounds fail with numpy 2.4 (int() of an array of one element); bfloat16 products multiply bit
patterns; float32 is cut to bfloat16, where GPUs round to the nearest and ties to even.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor
_dot = interpreter.InterpreterBuilder.create_dot
_cast = interpreter.InterpreterBuilder.cast_impl


def _patch_with_item(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _dot_of_bfloat16(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _dot(builder, _widened(a), _widened(b), *rest)


def _cast_to_nearest(builder: Any, source: Any, target: Any) -> Any:
    if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
        return _cast(builder, source, target)
    bits = source.data.astype(np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    rounded = np.where(np.isnan(source.data), np.uint16(0x7FC0), rounded)
    return interpreter.TensorHandle(rounded, tl.bfloat16)


interpreter._patch_lang_tensor = _patch_with_item
interpreter.InterpreterBuilder.create_dot = _dot_of_bfloat16
interpreter.InterpreterBuilder.cast_impl = _cast_to_nearest
