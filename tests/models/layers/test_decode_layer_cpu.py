"""The kernels of a decoder layer against torch in float64, and their bits at every number of tokens and threads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rlhfuse.models.cpu.tiles import LANES, lanes_up, panel_offsets, share_threads
from rlhfuse.models.layers import decode_layer_cpu

TOKENS, HIDDEN, MLP = 53, 40, 50  # odd on purpose: no tile and no panel is filled exactly
EPS = np.float32(1e-5)


@pytest.fixture(autouse=True)
def pool():
    """Starts numba's threads without changing torch's for the tests that follow."""
    share_threads()


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def to_panels(x: np.ndarray) -> np.ndarray:
    """x [T, F] -> [P, F, LANES], NaN in the lanes of no token: they must not matter."""
    wide = np.full((lanes_up(len(x)), x.shape[1]), np.nan, np.float32)
    wide[: len(x)] = x
    return wide.reshape(-1, LANES, x.shape[1]).transpose(0, 2, 1).copy()


def from_panels(x: np.ndarray, tokens: int) -> np.ndarray:
    return x.transpose(0, 2, 1).reshape(-1, x.shape[1])[:tokens]


def panels_out(kernel, rows: int, w: np.ndarray, x: np.ndarray, threads: int) -> np.ndarray:
    panels = to_panels(x)
    out = np.full((len(panels), rows, LANES), np.nan, np.float32)
    kernel(w, panels, panel_offsets(len(panels), x.shape[1]), len(x), out, threads)
    return from_panels(out, len(x))


def multiply(w: np.ndarray, x: np.ndarray, threads: int = 1) -> np.ndarray:
    return panels_out(decode_layer_cpu.multiply, len(w), w, x, threads)


def swiglu(w: np.ndarray, x: np.ndarray, threads: int = 1) -> np.ndarray:
    return panels_out(decode_layer_cpu.multiply_swiglu, len(w) // 2, w, x, threads)


def to_rows(w: np.ndarray, x: np.ndarray, threads: int = 1) -> np.ndarray:
    panels = to_panels(x)
    out = np.full((len(x), w.shape[0]), np.nan, np.float32)
    decode_layer_cpu.multiply_to_rows(w, panels, panel_offsets(len(panels), x.shape[1]), out, threads)
    return out


def norm(w: np.ndarray, x: np.ndarray, threads: int = 1) -> np.ndarray:
    panels = to_panels(x)
    out = np.full_like(panels, np.nan)
    decode_layer_cpu.add_norm(panels, 2 * panels, w[:0], w, EPS, out)
    return from_panels(out, len(x))


def wide(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).double()


def expected_norm(w: np.ndarray, x: np.ndarray) -> torch.Tensor:
    total = 3 * wide(x)
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + float(EPS)) * wide(w)


def expected_swiglu(w: np.ndarray, x: np.ndarray) -> torch.Tensor:
    gate, up = (wide(x) @ wide(w).T).chunk(2, dim=1)
    return F.silu(gate) * up


CASES = {
    "multiply": (multiply, lambda w, x: wide(x) @ wide(w).T, (61, HIDDEN)),
    "swiglu": (swiglu, expected_swiglu, (2 * MLP, HIDDEN)),
    "to_rows": (to_rows, lambda w, x: wide(x) @ wide(w).T, (61, HIDDEN)),
    "norm": (norm, expected_norm, (HIDDEN,)),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_bits(name):
    function, formula, shape = CASES[name]
    w, x = draw(*shape, seed=1), draw(TOKENS, HIDDEN)
    whole = function(w, x)
    expected = formula(w, x)
    assert (wide(whole) - expected).abs().max() < 1e-6 * expected.abs().max()
    for tokens in (1, 2, 8, 9, 15, 16, 17, 33):
        assert np.array_equal(function(w, x[:tokens]), whole[:tokens])
    assert np.array_equal(function(w, x, 3), whole)
    assert np.array_equal(function(w, x[7:20]), whole[7:20])  # in other lanes


def test_silu_at_its_ends():
    """No overflow at large gates, and NaN stays NaN."""
    w = np.eye(2, dtype=np.float32)
    x = np.array([[200.0, 1.0], [-200.0, 1.0], [np.nan, 1.0], [0.0, 1.0]], np.float32)
    out = swiglu(w, x)[:, 0]
    assert out[0] == 200 and abs(out[1]) < 1e-30 and np.isnan(out[2]) and out[3] == 0


def test_kernels_leave_torchs_threads_alone(programs):
    """numba's pool, when it starts, sets OpenMP's count for the whole process."""
    code = (
        "import torch, numba; torch.set_num_threads(1)\n"
        "from rlhfuse.models.cpu.tiles import share_threads\n"
        "assert share_threads() == 1 == torch.get_num_threads() == numba.get_num_threads()\n"
        "torch.set_num_threads(64)\n"
        "assert share_threads() == numba.config.NUMBA_NUM_THREADS and torch.get_num_threads() == 64"
    )
    done = programs.python("-c", code)
    assert done.returncode == 0, done.stderr
