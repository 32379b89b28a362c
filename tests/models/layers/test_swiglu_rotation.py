"""SwiGLU and rotation on CPU and as Triton kernels, in the interpreter against float64, and compiled for real GPUs."""

import pytest
import torch
from testkit.triton_compile import compiled_launches

from rlhfuse.models.layers import rotation
from rlhfuse.models.layers.operations import EXACT
from rlhfuse.models.layers.rotation_triton import turn
from rlhfuse.models.layers.swiglu_triton import swiglu

DTYPES = [torch.float32, torch.bfloat16]
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}  # of the largest element; the interpreter cuts bfloat16 off


def near(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == exact.shape and ours.dtype == dtype
    assert (ours.double() - exact).abs().max() <= 1e-30 + BOUND[dtype] * exact.abs().max()


@pytest.mark.parametrize(
    "function, dtype",
    [(swiglu, torch.float32), (swiglu, torch.bfloat16), (EXACT.swiglu, torch.float32)],
    ids=["triton", "triton-bfloat16", "cpu"],
)
@pytest.mark.parametrize("shape", [(7, 1, 64), (3, 5, 26), (1, 2), (2, 4100)])
def test_swiglu_and_its_gradient_are_the_formula_in_float64(shape, function, dtype):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(*shape, generator=generator)
    x.view(-1)[:1] = -200.0  # where a sigmoid without care overflows
    upstream = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator).to(dtype)
    leaf = x.to(dtype).requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    y = function(leaf)
    y.backward(upstream)
    gate, up = exact.chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    wanted.backward(upstream.double())
    near(y.detach(), wanted.detach(), dtype)
    near(leaf.grad, exact.grad, dtype)


def test_swiglu_of_no_rows():
    leaf = torch.empty(0, 8, requires_grad=True)
    (y := swiglu(leaf)).sum().backward()
    assert y.shape == (0, 4) and leaf.grad.shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dim", [(1, 2), (5, 64), (9, 80), (32, 128)])
@pytest.mark.parametrize("kernel", [True, False], ids=["triton", "torch"])
def test_rotation_and_its_gradient_are_complex_products_in_float64(monkeypatch, heads, dim, dtype, kernel):
    if kernel:
        monkeypatch.setattr(rotation, "_turn", turn)
    generator = torch.Generator().manual_seed(1)
    angles = torch.outer(torch.arange(400).double(), 0.1 ** torch.arange(dim // 2))
    positions = torch.randint(0, 400, (11,), generator=generator)
    row = torch.randn(11, heads * dim + 6, generator=generator).to(dtype)
    x = row[:, 6:].unflatten(1, (heads, dim)).requires_grad_()  # lies in a wider row
    upstream = torch.randn(11, heads, dim, generator=generator).to(dtype)
    y = rotation.rotate_packed(x, (angles.cos().float(), angles.sin().float()), positions)
    (dx,) = torch.autograd.grad(y, x, upstream)
    factors = torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    for ours, given, factor in ((y, x, factors), (dx, upstream, factors.conj())):
        product = torch.complex(*given.detach().double().chunk(2, dim=-1)) * factor
        near(ours.detach(), torch.cat((product.real, product.imag), dim=-1), dtype)


def launch_all() -> None:
    for dtype in DTYPES:
        x = torch.zeros(3, 2 * 14336, dtype=dtype, requires_grad=True)
        swiglu(x).sum().backward()
        tables = torch.zeros(64, 64), torch.zeros(64, 64)
        for back in (False, True):
            heads = torch.zeros(5, 6144, dtype=dtype)[:, :4096].unflatten(1, (32, 128))
            turn(heads, *tables, torch.zeros(5).long(), back)


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_without_spills(programs, arch):
    launches = compiled_launches(programs, __file__, arch)
    kernels = {launch.kernel for launch in launches}
    assert kernels == {"_swiglu_kernel", "_swiglu_backward_kernel", "_turn"} and len(launches) == 8
    assert not any(launch.stack for launch in launches), launches
