"""Tiles of every shape against a float64 product, and their bits against each other."""

import numpy as np
import pytest
import torch
from numba import njit

from rlhfuse.models.cpu.tiles import FEW, LANES, make_tile, panel_offsets

SHAPES = [(1, 1), (1, 4), (2, 4), (4, 1), (4, 4), (12, 2)]
K, ROWS, PANELS = 37, 12, 4


def runner(rows: int, panels: int, add: bool, lanes: int = LANES):
    tile = make_tile(rows, panels, add, lanes=lanes)

    @njit
    def run(w, x, offsets, out):
        for r in range(0, ROWS, rows):
            for p in range(0, PANELS, panels):
                at = (p * ROWS + r) * LANES
                tile(w, r * K, K, x, offsets, p, LANES, K, out, at, LANES, ROWS * LANES)

    return run


def draw(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=generator).to(dtype) for s in ((ROWS, K), (PANELS, K, LANES))]


def stored(x: torch.Tensor) -> np.ndarray:
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        pytest.param((torch.float32, torch.bfloat16), marks=pytest.mark.ci),  # numba compiles each shape of tile
    ],
    ids=str,
)
def test_every_shape_gives_the_same_bits(dtypes):
    w, x = draw(dtypes[0])[0], draw(dtypes[1])[1]
    expected = torch.einsum("nk,pkl->pnl", w.double(), x.double()).numpy()
    results = []
    for rows, panels in SHAPES:
        out = np.full((PANELS, ROWS, LANES), np.nan, np.float32)
        runner(rows, panels, False)(stored(w), stored(x), panel_offsets(PANELS, K), out)
        results.append(out)
    assert np.abs(results[0] - expected).max() < 1e-5
    for other in results[1:]:
        assert np.array_equal(other, results[0])
    out = np.full((PANELS, ROWS, LANES), np.nan, np.float32)
    runner(12, 1, False, FEW)(stored(w), stored(x), panel_offsets(PANELS, K), out)
    assert np.array_equal(out[..., :FEW], results[0][..., :FEW]) and np.isnan(out[..., FEW:]).all()


def test_adding_continues_the_chain():
    """Two tiles over halves of k, the second adding, give the bits of one over the whole."""
    w, x = (stored(t) for t in draw(torch.float32))
    first, rest, whole = make_tile(4, 1), make_tile(4, 1, add=True), make_tile(4, 1)

    @njit
    def halves(w, x, offsets, out, both):
        first(w, 0, K, x, offsets, 0, LANES, 20, out, 0, LANES, 0)
        rest(w, 20, K, x, offsets + 20 * LANES, 0, LANES, K - 20, out, 0, LANES, 0)
        whole(w, 0, K, x, offsets, 0, LANES, K, both, 0, LANES, 0)

    out, both = np.zeros((4, LANES), np.float32), np.zeros((4, LANES), np.float32)
    halves(w, x, panel_offsets(1, K), out, both)
    assert np.array_equal(out, both) and both.any()


def test_no_terms_give_zero_or_what_was_there():
    w, x = (stored(t) for t in draw(torch.float32))
    for add, left in ((False, 0.0), (True, 3.0)):
        tile = make_tile(1, 1, add)

        @njit
        def run(out):
            tile(w, 0, K, x, np.zeros(1, np.int64), 0, LANES, 0, out, 0, LANES, 0)

        out = np.full((1, LANES), 3.0, np.float32)
        run(out)
        assert (out == left).all()
