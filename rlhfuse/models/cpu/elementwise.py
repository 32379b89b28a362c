"""exp, log, rotation and bfloat16 for numba kernels, one scalar at a time, built to vectorise; errors are below 2 ulp.

Straight lines of float32 operations without a table or a branch: vector and scalar code give the same bits, so that a
value does not depend on where in an array it stood. numba's cache watches only the file of the cached function: after
a change here, touch the files that import it.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

F32 = np.float32
_LOG2E = F32(1.44269504088896341)
_LN2_HIGH = F32(0.693359375)
_LN2_LOW = F32(-2.12194440e-4)
_ROUNDER = F32(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low mantissa bits
_SQRT_HALF = F32(0.707106781186547524)
_LOWEST = F32(-87.0)  # exp below this is 0 for every use here


@njit(forceinline=True)
def exp32(x):
    """e**x of a float32 x <= 88; 0 below -87."""
    shifted = max(x, _LOWEST) * _LOG2E + _ROUNDER
    whole = shifted - _ROUNDER
    r = max(x, _LOWEST) - whole * _LN2_HIGH - whole * _LN2_LOW
    p = F32(1.9875691500e-4)
    p = p * r + F32(1.3981999507e-3)
    p = p * r + F32(8.3334519073e-3)
    p = p * r + F32(4.1665795894e-2)
    p = p * r + F32(1.6666665459e-1)
    p = p * r + F32(5.0000001201e-1)
    p = p * r * r + r + F32(1.0)
    bits = np.int32(F32(p).view(np.int32) + (F32(shifted).view(np.int32) << 23))
    return np.int32(bits).view(np.float32) if x >= _LOWEST else (F32(0.0) if x == x else x)


@njit(forceinline=True, error_model="numpy")  # numba's own model looks at every divisor, which is not vectorised
def sigmoid32(x):
    """1 / (1 + e**-x) of a float32."""
    return F32(1.0) / (F32(1.0) + exp32(min(-x, F32(88.0))))


@njit(forceinline=True)
def turned(a, b, cos, sin):
    """The pair (a, b) turned by an angle: rotary embedding."""
    return a * cos - b * sin, b * cos + a * sin


@njit(forceinline=True)
def _log_near_one(f, exponent):
    """log((1 + f) * 2**exponent) for 1 + f in [sqrt(1/2), sqrt(2))."""
    z = f * f
    p = F32(7.0376836292e-2)
    p = p * f - F32(1.1514610310e-1)
    p = p * f + F32(1.1676998740e-1)
    p = p * f - F32(1.2420140846e-1)
    p = p * f + F32(1.4249322787e-1)
    p = p * f - F32(1.6668057665e-1)
    p = p * f + F32(2.0000714765e-1)
    p = p * f - F32(2.4999993993e-1)
    p = p * f + F32(3.3333331174e-1)
    y = p * f * z + exponent * _LN2_LOW - F32(0.5) * z
    return f + y + exponent * _LN2_HIGH


@njit(forceinline=True)
def _split(x):
    """(f, exponent) with x = (1 + f) * 2**exponent and 1 + f in [sqrt(1/2), sqrt(2)), of a positive normal x."""
    bits = F32(x).view(np.int32)
    exponent = F32(np.int32((bits >> 23) - 126))
    mantissa = np.int32((bits & 0x007FFFFF) | 0x3F000000).view(np.float32)  # in [1/2, 1)
    low = mantissa < _SQRT_HALF
    return mantissa + (mantissa if low else F32(0.0)) - F32(1.0), exponent - (F32(1.0) if low else F32(0.0))


@njit(forceinline=True)
def log32(x):
    """Natural logarithm of a positive normal float32."""
    f, exponent = _split(x)
    return _log_near_one(f, exponent)


@njit(forceinline=True)
def neg_log_one_minus(v):
    """-log(1 - v) of a float32 v in (0, 1), with full relative precision for small v."""
    f, exponent = _split(F32(1.0) - v)
    return -_log_near_one(-v if exponent == F32(0.0) else f, exponent)


def widen(x):
    """float32 of a stored number: itself, or the bfloat16 whose bits are the uint16 x."""
    raise NotImplementedError("only for use inside numba functions")


@overload(widen, inline="always")
def _widen(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def store(array, index, x):
    """array[index] = x, rounded to the nearest bfloat16 (ties to even) where `array` holds uint16."""
    raise NotImplementedError("only for use inside numba functions")


@overload(store, inline="always")
def _store(array, index, x):
    if array.dtype == types.uint16:

        def narrow(array, index, x):
            bits = F32(x).view(np.uint32)
            rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
            array[index] = np.uint16(rounded >> np.uint32(16))

        return narrow

    def plain(array, index, x):
        array[index] = x

    return plain
