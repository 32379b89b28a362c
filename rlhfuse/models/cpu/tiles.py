"""The innermost loop of every CPU kernel: a small matrix product kept in vector registers, written as LLVM code.

    out[r, p, lane] (+)= sum_k  w[r, k] * x[p, k, lane]          r < rows, p < panels, lane < lanes

A *panel* is LANES columns side by side: 16 tokens, 16 keys or 16 dimensions. Each element is one chain of fused
multiply-adds over k in a lane of its own; LLVM's vectoriser does not keep such a tile in registers by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
FEW = 8  # lanes of a panel with no more tokens: half the work, and the same bits
WIDE = bool(binding.get_host_cpu_features().get("avx512f"))  # 32 registers of 16 floats; else 16 of 8 or 32 of 4
# Accumulators that fit the registers; and rows whose weights, a power of two apart, fit the ways of the first cache.
GEMM_ROWS, GEMM_PANELS = (8, 2) if WIDE else (4, 1)

_INDEX, _WORD = ir.IntType(64), ir.IntType(32)
_FLOAT = ir.FloatType()


def lanes_up(count: int) -> int:
    """`count` rounded up to whole panels."""
    return -(-count // LANES) * LANES


def make_tile(rows: int, panels: int, add: bool = False, ahead: str = "", lanes: int = LANES) -> Callable:
    """A function for numba code, tile(w, w_at, w_row, x, offsets, first, x_step, k, out, out_at, out_row, out_panel).

    w[w_at + r * w_row + i] is w[r, i]; x[offsets[first + p] + i * x_step + lane] is x[p, i, lane]; the result goes to
    out[out_at + r * out_row + p * out_panel + lane], added to what is there if `add`. All are positions in the flat
    memory of contiguous arrays: w and x float32 or uint16 (bfloat16), out float32, offsets int64.

    Meanwhile the tile may fetch what comes next into the cache: with ahead="rows" the rows of w behind its own
    (w contiguous); with ahead="panels" the panels at offsets[first + skip + p], where `skip` is one more argument.
    Fetching changes nothing that is computed; an address past the end of an array never faults.
    """

    vector = ir.VectorType(_FLOAT, lanes)

    def typed(w: Any, x: Any, offsets: Any, out: Any, more: int) -> Any:
        at = types.int64
        return types.void(w, at, at, x, offsets, at, at, at, out, at, at, at, *[at] * more)

    def generate(target: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        w, w_at, w_row, x, offsets, first, x_step, k, out, out_at, out_row, out_panel, *skip = args
        kinds = signature.args

        def pointer(kind: Any, array: Any, at: Any) -> Any:
            return builder.gep(target.make_array(kind)(target, builder, array).data, [at])

        chosen = pointer(kinds[4], offsets, first)
        coming = pointer(kinds[4], offsets, builder.add(first, skip[0])) if skip else chosen
        starts = pointer(kinds[0], w, w_at), pointer(kinds[3], x, _INDEX(0)), pointer(kinds[8], out, out_at)
        values = [*starts, chosen, coming, w_row, x_step, k, out_row, out_panel]
        name = f"tile_{rows}_{panels}_{lanes}_{add}_{ahead}_{kinds[0].dtype}_{kinds[3].dtype}"
        function = builder.module.globals.get(name) or body_of(name, builder.module, values, kinds)
        builder.call(function, values)
        return target.get_dummy_value()

    def body_of(name: str, module: ir.Module, values: list, kinds: Any) -> ir.Function:
        # A function of its own, never inlined: among other code LLVM does not keep the tile in registers.
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [value.type for value in values]), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        function.attributes.add("optsize")  # the loop is not unrolled: two rounds at once do not fit the registers
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        w_base, x_base, out_base, chosen, coming, w_row, x_step, k, out_row, out_panel = function.args

        def panels_at(places: Any) -> list:
            return [builder.gep(x_base, [builder.load(builder.gep(places, [_INDEX(p)]))]) for p in range(panels)]

        w_rows = [builder.gep(w_base, [builder.mul(w_row, _INDEX(r))]) for r in range(rows)]
        x_panels = panels_at(chosen)
        next_panels = panels_at(coming) if ahead == "panels" else []
        next_rows = [builder.gep(w_base, [builder.mul(w_row, _INDEX(rows))])] if ahead == "rows" else []

        def place_of(r: int, p: int) -> Any:
            offset = builder.add(builder.mul(out_row, _INDEX(r)), builder.mul(out_panel, _INDEX(p)))
            return builder.bitcast(builder.gep(out_base, [offset]), vector.as_pointer())

        places = [place_of(r, p) for r in range(rows) for p in range(panels)]

        def step(i: Any, sums: list) -> list:
            for row in next_rows:  # k steps pass over the next rows * k weights
                _fetch(builder, builder.gep(row, [builder.mul(i, _INDEX(rows))]))
            for panel in next_panels:
                _fetch(builder, builder.gep(panel, [builder.mul(i, x_step)]))
            return _multiply(builder, kinds, w_rows, x_panels, x_step, i, sums)

        zero = ir.Constant(vector, [0.0] * lanes)
        start = [builder.load(place, align=4) if add else zero for place in places]
        for place, total in zip(places, _loop(builder, k, start, step)):
            builder.store(total, place, align=4)
        builder.ret_void()
        return function

    @intrinsic
    def tile(context, w, w_at, w_row, x, offsets, first, x_step, k, out, out_at, out_row, out_panel):
        return typed(w, x, offsets, out, 0), generate

    @intrinsic
    def tile_and_next(context, w, w_at, w_row, x, offsets, first, x_step, k, out, out_at, out_row, out_panel, skip):
        return typed(w, x, offsets, out, 1), generate

    return tile_and_next if ahead == "panels" else tile


def _loop(builder: ir.IRBuilder, k: Any, start: list, body: Callable[[Any, list], list]) -> list:
    """The sums after i = 0 .. k - 1, held in phi nodes, that is in registers."""
    before = builder.block
    inside, after = builder.append_basic_block("tile"), builder.append_basic_block("tile.end")
    builder.cbranch(builder.icmp_signed(">", k, _INDEX(0)), inside, after)
    builder.position_at_end(inside)
    i = builder.phi(_INDEX)
    sums = [builder.phi(total.type) for total in start]
    new = body(i, sums)
    next_i = builder.add(i, _INDEX(1))
    i.add_incoming(_INDEX(0), before)
    i.add_incoming(next_i, inside)
    for phi, first, later in zip(sums, start, new):
        phi.add_incoming(first, before)
        phi.add_incoming(later, inside)
    builder.cbranch(builder.icmp_signed("<", next_i, k), inside, after)
    builder.position_at_end(after)
    results = []
    for first, later in zip(start, new):
        phi = builder.phi(first.type)
        phi.add_incoming(first, before)
        phi.add_incoming(later, inside)
        results.append(phi)
    return results


def _multiply(builder: ir.IRBuilder, kinds: Any, w_rows: list, x_panels: list, x_step: Any, i: Any, sums: list) -> list:
    """sums + w[:, i] * x[:, i, :]"""
    vector = sums[0].type
    undefined, lanes = ir.Constant(vector, ir.Undefined), vector.count
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32")
    step = builder.mul(i, x_step)
    x = [_load_panel(builder, kinds[3].dtype, builder.gep(panel, [step]), lanes) for panel in x_panels]
    new = []
    for r, row in enumerate(w_rows):
        w = _load_scalar(builder, kinds[0].dtype, builder.gep(row, [i]))
        spread = builder.insert_element(undefined, w, _WORD(0))
        spread = builder.shuffle_vector(spread, undefined, ir.Constant(ir.VectorType(_WORD, lanes), [0] * lanes))
        new += [builder.call(fma, [spread, x[p], sums[r * len(x) + p]]) for p in range(len(x))]
    return new


def _fetch(builder: ir.IRBuilder, place: Any) -> None:
    """Ask for a cache line, into the second level: a tile's own data is in the first."""
    byte = ir.IntType(8).as_pointer()
    fetch = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD]), "llvm.prefetch.p0i8"
    )
    builder.call(fetch, [builder.bitcast(place, byte), _WORD(0), _WORD(1), _WORD(1)])  # to read; locality 1; data


def _load_panel(builder: ir.IRBuilder, dtype: Any, place: Any, lanes: int) -> Any:
    vector = ir.VectorType(_FLOAT, lanes)
    if dtype == types.float32:
        return builder.load(builder.bitcast(place, vector.as_pointer()), align=4)
    halves, words = ir.VectorType(ir.IntType(16), lanes), ir.VectorType(_WORD, lanes)
    raw = builder.zext(builder.load(builder.bitcast(place, halves.as_pointer()), align=2), words)
    return builder.bitcast(builder.shl(raw, ir.Constant(words, [16] * lanes)), vector)


def _load_scalar(builder: ir.IRBuilder, dtype: Any, place: Any) -> Any:
    if dtype == types.float32:
        return builder.load(place)
    return builder.bitcast(builder.shl(builder.zext(builder.load(place), _WORD), _WORD(16)), _FLOAT)


def panel_offsets(panels: int, features: int) -> np.ndarray:
    """Where each panel of an activation [panels, features, LANES] begins."""
    return np.arange(panels, dtype=np.int64) * (features * LANES)


def shares(costs: np.ndarray, threads: int) -> np.ndarray:
    """[threads + 1] where each thread's part of so many things begins, so that all parts cost about the same."""
    ends = np.cumsum(costs)
    return np.concatenate(([0], np.searchsorted(ends, ends[-1] * np.arange(1, threads) / threads), [len(ends)]))


def share_threads() -> int:
    """Give the kernels torch's number of threads, as far as the machine has them; returns it. Call before a kernel.

    numba's OpenMP pool sets the thread count of the whole process when it starts: torch's is put back.
    """
    count = torch.get_num_threads()
    threads = min(count, numba.config.NUMBA_NUM_THREADS)  # pyright: ignore  numba sets its members at import
    if numba.get_num_threads() != threads:
        numba.set_num_threads(threads)
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return threads
