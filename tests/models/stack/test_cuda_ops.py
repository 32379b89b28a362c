"""The CUDA kernels of a layer, in the interpreter, against autograd of plain torch in float64; and compiled."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from testkit import triton_interpreter  # noqa: F401
from testkit.triton_compile import compiled_launches

from rlhfuse.models.attention.packed.dense import dense_attention
from rlhfuse.models.attention.packed.sequences import SequenceBorders
from rlhfuse.models.stack import cuda_ops, handle
from rlhfuse.models.stack.cuda_ops import CudaOps
from rlhfuse.models.stack.handle import Handle
from rlhfuse.models.stack.torch_ops import HeadShape

CPU, EPS = torch.device("cpu"), 1e-5
TYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = (7, 1, 15)
SHAPES = [HeadShape(4, 2, 16), HeadShape(7, 1, 40), HeadShape(3, 3, 6), HeadShape(10, 2, 128)]


def randn(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(seed, *shape, dtype):
    """A trained one, whose gradient has a part of a micro-batch before and lies at an odd address."""
    made = torch.nn.Parameter((1 + randn(seed, *shape)).to(dtype))
    made.main_grad = torch.zeros(made.numel() + 1)[1:].view(shape)
    made.main_grad.fill_(0.5)
    return made


def ops_of(shape=SHAPES[0]):
    angles = torch.outer(torch.arange(64).float(), 0.3 ** torch.arange(shape.dim // 2))
    return CudaOps(SimpleNamespace(up_to=lambda length: (angles.cos(), angles.sin())), shape, EPS, CPU)


def exactly(function, *inputs):
    """(what it gives, a function from that's gradient to those of its inputs), in float64."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out.detach(), lambda *gradients: torch.autograd.grad(out, leaves, [g.double() for g in gradients][0])


def near(found, exact, roundings=1):
    """In float32 5e-7 of the whole; in 16 bits `roundings` of each number, and float32's of the largest."""
    assert found.shape == exact.shape and exact.abs().max() > 0
    gap = found.double() - exact
    if found.dtype == torch.float32:
        assert gap.norm() <= 5e-7 * exact.norm()
    else:
        step = torch.finfo(found.dtype).eps
        assert (
            gap.abs() <= 0.51 * roundings * step * exact.abs() + (2e-6 + (roundings - 1) * step / 2) * exact.abs().max()
        ).all()


def near_gradient(weight, exact):
    """A trained weight with what was there and the gradient, both float32."""
    near(weight.main_grad, exact + 0.5)


def rms_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens, size", [(1, 64), (3, 100), (90, 24)])
@pytest.mark.parametrize("parts", ["nothing", "delta", "delta and bias"])
def test_norm(tokens, size, parts, dtype, monkeypatch):
    monkeypatch.setattr(cuda_ops, "PROGRAMS", 40)
    ops, scale = ops_of(), weight(3, size, dtype=dtype)
    x, delta, gradient, residual = (randn(seed, tokens, size, dtype=dtype) for seed in range(4))
    bias = randn(5, size, dtype=dtype) if "bias" in parts else None
    whole = x if parts == "nothing" else x + (delta if bias is None else delta + bias)
    total, normed, saved = ops.norm(x.clone(), None if parts == "nothing" else delta, bias, scale)
    assert torch.equal(total, whole), "the residual is rounded as torch's additions are"
    exact, backward = exactly(rms_norm, total, scale)
    near(normed, exact)
    dx, dweight = backward(gradient)
    near(ops.norm_backward(gradient, total, scale, saved, residual), dx + residual.double())
    near_gradient(scale, dweight)
    scale.requires_grad_(False)
    ops.norm_backward(gradient, total, scale, saved, residual)
    near_gradient(scale, dweight)


def heads(qkv, shape, tables, positions, *norms):
    """q, k and v, one behind another [T, H + 2 G, D]."""
    parts = qkv.view(len(qkv), shape.groups, -1, shape.dim)
    turning = [parts[:, :, :-2].flatten(1, 2), parts[:, :, -2]]
    if norms:
        turning = [rms_norm(x, weight) for x, weight in zip(turning, norms)]
    first, second = torch.cat(turning, 1).chunk(2, -1)
    cos, sin = (table[positions][:, None].double() for table in tables)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((turned, parts[:, :, -1]), 1)


@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm", [False, True])
def test_heads(shape, norm, dtype, monkeypatch):
    monkeypatch.setattr(cuda_ops, "PROGRAMS", 2)
    ops, batch = ops_of(shape), ops_of(shape).batch(SequenceBorders.of(LENGTHS, CPU))
    tokens, counts = sum(LENGTHS), (shape.heads, shape.groups, shape.groups)
    qkv = randn(0, tokens, sum(counts) * shape.dim, dtype=dtype)
    norms = (weight(1, shape.dim, dtype=dtype), weight(2, shape.dim, dtype=dtype)) if norm else None
    *found, saved = ops.split(qkv, norms, batch)
    exact, backward = exactly(lambda x, *w: heads(x, shape, batch[1], batch[0].positions, *w), qkv, *(norms or ()))
    for x, wanted in zip(found, exact.split(counts, 1)):
        near(x, wanted, 2 if norm else 1)
    gradients = [randn(5 + i, tokens, count, shape.dim, dtype=dtype) for i, count in enumerate(counts)]
    wanted, *of_norms = backward(torch.cat(gradients, 1))
    near(ops.join(gradients, saved, norms, batch), wanted)
    for one, its in zip(norms or (), of_norms):
        near_gradient(one, its)


def dense(q, k, v, at):
    """Attention as flash-attention gives it: out and the logarithms of its sums."""
    groups = q.shape[1] // k.shape[1]
    outs, sums = [], []
    for a, b in zip(at, at[1:]):
        ours, keys, values = (x[a:b].transpose(0, 1) for x in (q, *(x.repeat_interleave(groups, 1) for x in (k, v))))
        scores = ours @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(b - a, b - a).triu(1).bool(), -torch.inf)
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_attention(shape, flash, monkeypatch):
    ops, batch = ops_of(shape), ops_of(shape).batch(SequenceBorders.of(LENGTHS, CPU))
    dtype = torch.float16 if flash else torch.float32
    counts = shape.heads, shape.groups, shape.groups
    q, k, v = (randn(i, sum(LENGTHS), count, shape.dim, dtype=dtype) for i, count in enumerate(counts))

    def forward(q, k, v, at, also, longest, too, dropout, causal, debug, **window):
        assert (longest, too, dropout, causal, debug) == (15, 15, 0.0, True, False) and at is also
        assert window == {"window_size_left": -1, "window_size_right": 0}
        out, sums = dense(*(x.double() for x in (q, k, v)), at.tolist())
        return out.to(dtype), sums, None, None, None

    def backward(gradient, q, k, v, out, sums, at, *rest, **window):
        assert torch.equal(out, forward(q, k, v, at, *rest[:4], True, False, **window)[0]) and sums.shape[0] == len(
            q[0]
        )
        made = exactly(lambda *qkv: dense(*qkv, at.tolist())[0], q, k, v)[1](gradient)
        return [x.to(dtype) for x in made]

    if flash:
        ops._flash = True
        monkeypatch.setattr(cuda_ops, "FLASH", forward)
        monkeypatch.setattr(cuda_ops, "FLASH_BACKWARD", backward)
    out, saved = ops.attend(q, k, v, batch)
    exact, pulled = exactly(lambda *qkv: dense(*qkv, batch[0].borders)[0].flatten(1), q, k, v)
    near(out, exact)
    gradient = randn(7, *out.shape, dtype=dtype)
    for found, wanted in zip(ops.attend_backward(gradient, q, k, v, out, saved, batch), pulled(gradient)):
        assert found.is_contiguous()
        near(found, wanted)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens, width", [(7, 32), (15, 13), (1, 2050)])
def test_swiglu(tokens, width, dtype):
    ops, x, gradient = ops_of(), 4 * randn(0, tokens, 2 * width, dtype=dtype), randn(1, tokens, width, dtype=dtype)
    x[0, 0] = -200.0  # where a sigmoid without care overflows
    exact, backward = exactly(lambda x: F.silu(x[:, :width]) * x[:, width:], x)
    y = ops.swiglu(x)
    near(y, exact)
    (wanted,) = backward(gradient)
    for known in (y, None):
        dx, again = ops.swiglu_backward(x, gradient, known)
        near(dx, wanted)
        assert torch.equal(again, y)


@pytest.mark.parametrize("dtype", TYPES)
def test_products(dtype, monkeypatch):
    def added(total, a, b, *, out_dtype, out):
        assert total is out and out_dtype == torch.float32 == total.dtype
        out += a.float() @ b.float()

    monkeypatch.setattr(torch, "addmm", added)  # the CPU has none that ends in another dtype
    ops, x, gradient = ops_of(), randn(0, 9, 12, dtype=dtype), randn(1, 9, 5, dtype=dtype)
    matrix, bias = weight(2, 5, 12, dtype=dtype), weight(3, 5, dtype=dtype)
    exact, backward = exactly(lambda x, w, b: x @ w.t() + b, x, matrix, bias)
    near(ops.linear(x, matrix, bias).detach(), exact)
    ops.add_product(matrix, gradient, x)
    ops.add_rows(bias, gradient)
    for one, wanted in zip((matrix, bias), backward(gradient)[1:]):
        near_gradient(one, wanted)


def test_no_tokens_are_no_launches():
    ops, shape = ops_of(), SHAPES[0]
    batch = ops.batch(SequenceBorders.of([0], CPU))
    x, scale, wide = torch.empty(0, 8), weight(0, 8, dtype=torch.float32), torch.empty(0, 8 * 16)
    total, normed, saved = ops.norm(x, x, None, scale)
    assert total.shape == normed.shape == ops.norm_backward(x, x, scale, saved, x).shape == x.shape
    q, k, v, saved = ops.split(wide, None, batch)
    assert q.shape == (0, shape.heads, 16) and ops.join((q, k, v), saved, None, batch).shape == wide.shape
    assert ops.swiglu(x).shape == (0, 4) and ops.swiglu_backward(x, x[:, :4], None)[0].shape == x.shape
    assert dense_attention(q, k, v, batch[0]).shape == q.shape and (scale.main_grad == 0.5).all()


def test_a_handle_launches_the_kernel_where_it_serves_and_leaves_the_rest_to_triton(monkeypatch):
    said = []

    class Kernel:
        arg_names, __name__ = ["x", "y", "count", "SIZE"], "kernel"
        params = [
            SimpleNamespace(name=name, do_not_specialize=name == "count", do_not_specialize_on_alignment=name == "y")
            for name in arg_names
        ]

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                said.append("triton")
                return SimpleNamespace(run=lambda *words: said.append(words), function="f", packed_metadata="m")

            return launch

    active = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: 10 * device)
    monkeypatch.setattr(handle, "driver", SimpleNamespace(active=active))
    x, odd = torch.zeros(8), torch.zeros(8)[1:]
    launch = Handle(Kernel(), 1, SIZE=7, num_warps=2)
    launch(5, 6, odd, odd, 1)
    launch(5, 6, x, odd, 1)
    assert said == ["triton"] * 2, "the first was for addresses that are not aligned"
    launch(5, 6, x, odd, 2)
    assert said[2:] == [(5, 6, 1, 30, "f", "m", None, None, None, x, odd, 2, 7)]
    launch(5, 6, odd, odd, 2)
    launch(5, 6, x.half(), odd, 2)
    assert said[3:] == ["triton"] * 2
    Kernel.params[2].do_not_specialize = False
    with pytest.raises(TypeError, match="count"):
        Handle(Kernel(), 1, SIZE=7)(5, 6, x, odd, 1)


def launch_all() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for size in (4096, 5120, 8192):
            ops, x, scale = ops_of(), torch.empty(3, size, dtype=dtype), weight(0, size, dtype=dtype)
            for delta, bias in ((None, None), (x, None), (x, scale)):
                ops.norm(x, delta, bias, scale)
            ops.norm_backward(x, x, scale, torch.empty(3), x)
            ops.swiglu(x)
            for y in (x, None):
                ops.swiglu_backward(torch.empty(3, 2 * size, dtype=dtype), x, y)
        for shape in (HeadShape(32, 8, 128), HeadShape(28, 4, 64), HeadShape(10, 2, 80), HeadShape(16, 1, 256)):
            ops = ops_of(shape)
            batch = ops.batch(SequenceBorders.of([3], CPU))
            qkv = torch.empty(3, (shape.heads + 2 * shape.groups) * shape.dim, dtype=dtype)
            for norms in (None, (weight(0, shape.dim, dtype=dtype), weight(1, shape.dim, dtype=dtype))):
                *parts, saved = ops.split(qkv, norms, batch)
                ops.join(parts, saved, norms, batch)


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_without_spills(programs, arch):
    launches = compiled_launches(programs, __file__, arch)
    assert {launch.kernel for launch in launches} == {
        *("add_norm_kernel", "norm_backward_kernel", "add_parts_kernel", "place_heads_kernel", "join_kernel"),
        *("swiglu_kernel", "swiglu_backward_kernel"),
    }
    assert not any(launch.stack for launch in launches), [launch for launch in launches if launch.stack]
    assert all("v4.b32" in launch.ptx for launch in launches[:5]), "loads are 16 bytes of a thread each"
