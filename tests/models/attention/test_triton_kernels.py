"""The Triton kernels over cache blocks, in the interpreter, against the formula in float64; and compiled."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit import triton_interpreter  # noqa: F401
from testkit.paged_case import PagedCase
from testkit.profiles import examples
from testkit.triton_compile import compiled_launches

from rlhfuse.models.attention.paged import triton_kernels as kernels
from rlhfuse.models.attention.paged.cache import PagedQueries


class Case(PagedCase):
    """Run by the kernels, whose counters are zero again behind them."""

    def decode(self, processors: int = 4) -> torch.Tensor:
        self.counters = torch.zeros(len(self.contexts) * self.keys.shape[2], dtype=torch.int32)
        cache = self.keys, self.values, self.tables, torch.tensor(self.contexts, dtype=torch.int32)
        return kernels.decode(self.q, *cache, self.counters, processors)

    def mixed(self, processors: int = 4) -> torch.Tensor:
        self.counters = torch.zeros(len(self.contexts) * self.keys.shape[2], dtype=torch.int32)
        queries = PagedQueries.of(self.tables, self.starts, self.contexts)
        return kernels.mixed(self.q, self.keys, self.values, queries, self.counters, processors)

    def check(self, found: torch.Tensor) -> None:
        limit = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[self.q.dtype]
        assert found.dtype == self.q.dtype and found.shape == self.q.shape
        assert (found.double() - self.expected()).abs().max() < limit
        assert not self.counters.any(), "the next launch wants zeros"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "heads, dim, block",
    [((4, 4), 16, 16), ((8, 2), 64, 16), ((7, 1), 128, 32), ((12, 2), 80, 1), ((24, 1), 96, 5), ((3, 1), 256, 256)],
)
def test_decode(heads, dim, block, dtype):
    case = Case([1] * 4, [1, 5, 200, 390], *heads, dim, block, dtype)
    case.check(case.decode(processors=20))


@examples(25)
@given(st.data())
def test_decode_of_any_shape(data):
    contexts = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    groups = data.draw(st.integers(1, 2))
    shape = groups * data.draw(st.integers(1, 7)), groups, data.draw(st.sampled_from([16, 40, 112]))
    block = data.draw(st.sampled_from([1, 4, 16, 24, 64]))
    case = Case([1] * len(contexts), contexts, *shape, block)
    case.check(case.decode(data.draw(st.sampled_from([1, 6, 132]))))


def test_contexts_cut_into_parts_give_what_they_give_whole():
    case = Case([1] * 3, [1000, 129, 128], 4, 1, 32, 16, more_columns=20)
    assert kernels.decode_splits(3, 1, 1312, 132) == 11
    whole, cut = case.decode(processors=1), case.decode(processors=132)
    case.check(whole)
    case.check(cut)
    assert (whole - cut).abs().max() < 1e-6 and torch.equal(cut, case.decode(processors=132))


@pytest.mark.parametrize(
    "rows, groups, tokens, splits",
    [(1, 8, 256, 2), (1, 8, 8192, 33), (64, 8, 8192, 4), (256, 8, 1024, 1), (1, 1, 1 << 20, 32), (300, 1, 64, 1)],
)
def test_parts_follow_from_the_shape(rows, groups, tokens, splits):
    assert kernels.decode_splits(rows, groups, tokens, 132) == min(splits, kernels.MOST_SPLITS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, dim, block", [((2, 2), 16, 16), ((7, 1), 64, 16), ((5, 1), 96, 5)])
def test_mixed(heads, dim, block, dtype):
    case = Case([1, 20, 1, 45, 7, 2], [150, 20, 1, 100, 70, 2], *heads, dim, block, dtype)
    case.check(case.mixed())


@examples(10)
@given(st.data())
def test_mixed_of_any_shape(data):
    contexts = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    queries = [data.draw(st.sampled_from([1, n, (n + 1) // 2])) for n in contexts]
    groups = data.draw(st.integers(1, 2))
    shape = groups * data.draw(st.sampled_from([1, 3, 4])), groups, data.draw(st.sampled_from([16, 48]))
    case = Case(queries, contexts, *shape, data.draw(st.sampled_from([1, 16, 24])))
    case.check(case.mixed())


COMPILED = [(torch.bfloat16, (8, 2), 128), (torch.float16, (12, 2), 80), (torch.float32, (8, 2), 128)]


def launch_all() -> None:
    for dtype, heads, dim in COMPILED:
        Case([1] * 3, [1, 5, 200], *heads, dim, 16, dtype).decode(132)
        Case([1, 40, 3], [1, 50, 200], *heads, dim, 16, dtype).mixed(132)


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_and_keep_their_sums_in_registers(programs, arch):
    launches = compiled_launches(programs, __file__, arch)
    names = ["_decode_kernel", "_decode_kernel", "_chunk_kernel"]
    assert [launch.kernel for launch in launches] == names * len(COMPILED)
    decode = [launch for launch in launches if launch.kernel == "_decode_kernel"]
    assert not any(launch.stack for launch in decode) and max(launch.shared for launch in decode) < 76 << 10
    # A tile of 128 queries in 16 bits takes all registers of an A100, and a few words more.
    assert max(launch.stack for launch in launches) <= (80 if arch == 80 else 0)
    for launch in decode:  # all threads have stored their part before one counts it, and none reads before that
        before, after = launch.ptx.split("atom.global.gpu.acq_rel.add.u32")
        assert "bar.sync" in before[before.rindex("st.global") :]
        assert "bar.sync" in after[: after.index("ld.global")]
