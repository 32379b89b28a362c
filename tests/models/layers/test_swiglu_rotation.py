"""SwiGLU and rotation, on CPU and as the engine's Triton kernel in the interpreter, against float64."""

import pytest
import torch
from testkit import triton_interpreter  # noqa: F401

from rlhfuse.models.layers.decode_layer_triton import gate_rows
from rlhfuse.models.layers.operations import EXACT, TORCH
from rlhfuse.models.layers.rotation import rotate_packed

DTYPES = [torch.float32, torch.bfloat16]
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}  # of the largest element


def near(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == exact.shape and ours.dtype == dtype
    assert (ours.double() - exact).abs().max() <= 1e-30 + BOUND[dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [EXACT.swiglu, TORCH.swiglu, gate_rows], ids=["cpu", "torch", "triton"])
@pytest.mark.parametrize("shape", [(7, 1, 64), (3, 5, 26), (1, 2), (2, 4100)])
def test_swiglu_is_the_formula_in_float64(shape, function, dtype):
    x = (4 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    x.view(-1)[0] = -200.0  # where a sigmoid without care overflows
    gate, up = x.double().chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    near(function(x), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dim", [(1, 2), (5, 64), (9, 80), (32, 128)])
@pytest.mark.parametrize("back", [False, True])
def test_rotation_is_a_complex_product_in_float64(heads, dim, dtype, back):
    generator = torch.Generator().manual_seed(1)
    angles = torch.outer(torch.arange(400).double(), 0.1 ** torch.arange(dim // 2))
    positions = torch.randint(0, 400, (11,), generator=generator)
    x = torch.randn(11, heads, dim, generator=generator).to(dtype)
    y = rotate_packed(x, (angles.cos().float(), angles.sin().float()), positions, back)
    factors = torch.polar(torch.ones_like(angles), -angles if back else angles)[positions][:, None]
    product = torch.complex(*x.double().chunk(2, dim=-1)) * factors
    near(y, torch.cat((product.real, product.imag), dim=-1), dtype)
