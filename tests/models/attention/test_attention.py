"""Paged and packed attention against the plain formula, and their exactness."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.flat import attention
from testkit.paged_case import PagedCase, causal
from testkit.profiles import examples

from rlhfuse.models.attention import backends
from rlhfuse.models.attention.packed import dense, flash_attention
from rlhfuse.models.attention.packed.sequences import PackedShape, SequenceBorders
from rlhfuse.models.attention.paged import cpu as paged_cpu
from rlhfuse.models.attention.paged.cache import PagedQueries
from rlhfuse.models.attention.paged.gathered import GatheredAttention
from rlhfuse.models.cpu.elementwise import exp32, log32, neg_log_one_minus
from rlhfuse.models.cpu.tiles import LANES, lanes_up, share_threads
from rlhfuse.models.stack import torch_ops

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def numba_threads(one_thread):
    """As many as torch's."""
    share_threads()


class Case(PagedCase):
    def cpu(self, sequences: slice = slice(None), threads: int = 1) -> np.ndarray:
        blocks, bt, groups, dim = self.keys.shape
        keys = np.full((blocks, groups, dim, lanes_up(bt)), np.nan, np.float32)
        values = np.full((blocks, groups, bt, lanes_up(dim)), np.nan, np.float32)
        keys[..., :bt], values[..., :dim] = self.keys.numpy().transpose(0, 2, 3, 1), self.values.transpose(1, 2).numpy()
        chosen = range(len(self.contexts))[sequences]
        q = np.concatenate([self.q[self.starts[s] : self.starts[s + 1]] for s in chosen])
        starts = np.concatenate(([0], np.cumsum([self.queries[s] for s in chosen])))
        queries = paged_cpu.Queries.of(starts, np.array([self.contexts[s] for s in chosen]), groups, threads)
        out = np.full((lanes_up(len(q)) // LANES, q.shape[1] * dim, LANES), np.nan, np.float32)
        tables, scale = self.tables.numpy()[sequences], np.float32(dim**-0.5)
        paged_cpu.paged_attention(q, keys, values, tables, *queries, scale, out)
        return out.transpose(0, 2, 1).reshape(-1, *q.shape[1:])[: len(q)]

    def device(self) -> torch.Tensor:
        queries = PagedQueries.of(self.tables, self.starts, self.contexts)
        return GatheredAttention().mixed(queries)(self.q, self.keys, self.values)


@examples(40)
@given(st.data())
def test_paged_attention(data):
    contexts = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    queries = [data.draw(st.sampled_from([1, n, (n + 1) // 2])) for n in contexts]
    groups = data.draw(st.integers(1, 3))
    heads = groups * data.draw(st.integers(1, 7))
    shape = (heads, groups, data.draw(st.sampled_from([6, 8, 32, 64, 80])), data.draw(st.sampled_from([1, 5, 16, 40])))
    case = Case(queries, contexts, *shape)
    ours, expected = case.cpu(), case.expected()
    assert (torch.from_numpy(ours) - expected).abs().max() < 5e-6
    assert (case.device() - expected).abs().max() < 5e-6
    assert np.array_equal(case.cpu(threads=3), ours)
    for s in range(len(contexts)):  # bit for bit the same alone
        assert np.array_equal(case.cpu(slice(s, s + 1)), ours[case.starts[s] : case.starts[s + 1]])


def test_prefill_and_decode_give_the_same_bits():
    case = Case([50], [50], 4, 2, 32, 16)
    whole = case.cpu()
    for n in range(1, 51):
        case.queries, case.contexts, case.starts = [1], [n], [n - 1, n]
        assert np.array_equal(case.cpu()[0], whole[n - 1])


def angles(dim: int, length: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    turned = torch.outer(torch.arange(length).double(), 0.1 ** torch.arange(dim // 2))
    return turned.cos().float(), turned.sin().float()


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One sequence [T, heads, D], each pair (x[d], x[d + D / 2]) as a complex number times that of its angle."""
    a, b = x.double().chunk(2, dim=-1)
    product = torch.complex(a, b) * torch.complex(cos.double(), sin.double())[: len(x), None]
    return torch.cat((product.real, product.imag), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, groups, dim", [(8, 4, 8), (4, 4, 16), (8, 2, 64)])
@pytest.mark.parametrize("lengths", [(5, 5, 5, 1, 1, 5), (85,) * 8, (300, 300, 7, 7)])
def test_neighbours_change_no_bit(heads, groups, dim, lengths, dtype):
    """Those of one length may be one batch; each by itself, the same output and gradients."""
    torch.manual_seed(len(lengths))
    rotary, sizes = angles(dim), [(sum(lengths), count, dim) for count in (heads, groups, groups)]
    whole = [torch.randn(*size, dtype=dtype, requires_grad=True) for size in sizes]
    out = attention(*whole, rotary, SequenceBorders.of(lengths, CPU))
    gradient = torch.randn_like(out)
    together, alone = [out, *torch.autograd.grad(out, whole, gradient)], []
    for length, upstream, *one in zip(lengths, gradient.split(lengths), *(x.detach().split(lengths) for x in whole)):
        one = [x.requires_grad_() for x in one]
        out = attention(*one, rotary, SequenceBorders.of([length], CPU))
        alone.append([out, *torch.autograd.grad(out, one, upstream)])
    for found, parts in zip(together, zip(*alone)):
        assert torch.equal(found, torch.cat(parts))


def attend_flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, *, causal=False):
    """flash-attn's arguments."""
    assert causal and cu_seqlens_k is cu_seqlens_q and max_seqlen_k == max_seqlen_q
    return by_sequence(q, k, v, cu_seqlens_q, max_seqlen_q)


def by_sequence(q, k, v, borders, longest):
    assert borders.dtype == torch.int32 and borders.diff().max() == longest
    pairs = list(zip(borders.tolist(), borders.tolist()[1:]))
    return torch.cat([causal(q[a:b], k[a:b], v[a:b]) for a, b in pairs]).to(q.dtype)


@pytest.fixture
def fresh_choice():
    backends.choose_packed.cache_clear()
    yield
    backends.choose_packed.cache_clear()


@pytest.mark.parametrize(
    "kernel, groups, dim",
    [
        *(("cpu", groups, dim) for groups, dim in [(1, 16), (2, 6), (2, 80), (4, 16)]),
        *((kernel, 2, 16) for kernel in (attend_flash, "dense")),
    ],
)
def test_packed_attention_and_its_gradients_are_the_formula(monkeypatch, kernel, groups, dim):
    """In float32 on the CPU, else in bfloat16; with gradients; and no kernel asks for a number on the device."""
    if callable(kernel):
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=kernel))
        monkeypatch.setattr(torch_ops, "choose_packed", flash_attention.make)
    dtype, limit = (torch.float32, 2e-6) if kernel == "cpu" else (torch.bfloat16, 0.02)
    generator, lengths, rotary = torch.Generator().manual_seed(0), [5, 1, 17, 17, 40, 100], angles(dim)
    sizes = [(sum(lengths), heads, dim) for heads in (4, groups, groups)]
    made = [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    sequences = SequenceBorders.of(lengths, CPU)
    with monkeypatch.context() as reads:
        if kernel == "dense":  # the doubles read borders for the formula
            for name in ("tolist", "item", "__int__", "__bool__", "__index__", "nonzero"):
                reads.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} waits for the device"))
        out = attention(*made, rotary, sequences)
    exact = [x.detach().double().requires_grad_() for x in made]
    ends = sequences.borders
    parts = [
        causal(turned(exact[0][a:b], *rotary), turned(exact[1][a:b], *rotary), exact[2][a:b])
        for a, b in zip(ends, ends[1:])
    ]
    wanted = torch.cat(parts)
    upstream = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(upstream)
    wanted.backward(upstream.double())
    assert out.dtype == dtype and (out - wanted).abs().max() < limit
    for ours, theirs in zip(made, exact):
        assert (ours.grad - theirs.grad).abs().max() <= limit * theirs.grad.abs().max()


@pytest.mark.parametrize(
    "capability, dtype, dim, slow, words",
    [
        ((9, 0), torch.bfloat16, 64, True, "flash-attn is not installed"),
        ((7, 5), torch.bfloat16, 64, True, "compute capability 8.0"),
        ((9, 0), torch.float32, 64, True, "computes in 16 bits, not in float32"),
        ((9, 0), torch.bfloat16, 288, True, "up to 256, not 288"),
    ],
)
def test_the_kernel_is_chosen_by_name_and_told_once(
    monkeypatch, fresh_choice, capsys, recwarn, capability, dtype, dim, slow, words
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    for _ in range(2):
        kernel = backends.choose_packed(PackedShape(CUDA, dtype, dim))
    assert (kernel is dense.dense_attention) == slow
    told = capsys.readouterr().out + "".join(str(warning.message) for warning in recwarn)
    assert words in told and told.count("packed attention of training and scoring") == 1


def test_packed_attention_is_the_same_with_three_threads_and_with_one():
    rotary, sequences = angles(8), SequenceBorders.of((7, 83, 1, 109), CPU)
    found = []
    for threads in (1, 3):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        q, k, v = (torch.randn(200, count, 8, requires_grad=True) for count in (4, 2, 2))
        out = attention(q, k, v, rotary, sequences)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(torch.equal(one, three) for one, three in zip(*found))


def test_elementary_functions():
    x = np.linspace(-86, 0, 4001).astype(np.float32)
    ours = np.array([exp32(v) for v in x])
    assert np.abs(ours / np.exp(x.astype(np.float64)) - 1).max() < 3e-7
    assert exp32(np.float32(-200)) == 0 == exp32(np.float32(-np.inf)) and np.isnan(exp32(np.float32(np.nan)))
    y = np.geomspace(1e-30, 1e30, 4001).astype(np.float32)
    assert np.abs(np.array([log32(v) for v in y]) - np.log(y.astype(np.float64))).max() < 1e-5
    u = np.geomspace(1e-10, 1 - 2.0**-24, 4001).astype(np.float32)
    u = np.minimum(u, np.float32(1 - 2.0**-24))
    expected = -np.log1p(-u.astype(np.float64))
    assert np.abs(np.array([neg_log_one_minus(v) for v in u]) / expected - 1).max() < 1e-6
