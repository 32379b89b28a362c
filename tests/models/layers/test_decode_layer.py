"""The kernels between a decoder layer's products, in the interpreter, against plain torch; and compiled."""

import pytest
import torch
from testkit import triton_interpreter  # noqa: F401
from testkit.triton_compile import compiled_launches

from rlhfuse.models.layers.decode_layer_triton import add_norm, place_heads

TYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Within one rounding, and what float32 sums lose."""
    step = torch.finfo(found.dtype).eps
    assert ((found.double() - exact).abs() <= (0.51 * step + 2e-6) * exact.abs() + 1e-6).all()


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens, size", [(1, 64), (3, 100), (5, 2048)])
@pytest.mark.parametrize("parts", ["nothing", "delta", "delta and bias"])
def test_add_norm(tokens, size, parts, dtype):
    x, delta = randn(0, tokens, size, dtype=dtype), randn(1, tokens, size, dtype=dtype)
    bias, weight = randn(2, size, dtype=dtype), 1 + randn(3, size, dtype=dtype)
    expected = x if parts == "nothing" else x + delta if parts == "delta" else x + (delta + bias)
    expected = expected.clone()
    found = add_norm(x, None if parts == "nothing" else delta, bias if "bias" in parts else None, weight, EPS)
    assert torch.equal(x, expected), "the residual is rounded as torch's additions are"
    near(found, normed(expected, weight))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("tokens, groups, heads, dim", [(1, 2, 4, 16), (5, 1, 7, 40), (3, 3, 1, 128), (4, 2, 5, 6)])
def test_place_heads(tokens, groups, heads, dim, norm, dtype):
    qkv = randn(0, tokens, groups * (heads + 2) * dim, dtype=dtype)
    norms = (1 + randn(1, dim, dtype=dtype), 1 + randn(2, dim, dtype=dtype)) if norm else None
    angles = torch.outer(torch.arange(50).float(), 0.3 ** torch.arange(dim // 2))
    rotary, positions = (angles.cos(), angles.sin()), torch.tensor([7, 0, 49, 7, 12])[:tokens]
    blocks, block_tokens = 6, 4
    slots = torch.randperm(blocks * block_tokens, generator=torch.Generator().manual_seed(3))[:tokens]
    keys, values = torch.full((2, blocks, block_tokens, groups, dim), torch.nan, dtype=dtype)
    q = place_heads(qkv, norms, EPS, rotary, (positions, slots), (keys, values))

    parts = qkv.view(tokens, groups, heads + 2, dim)
    turning = [parts[:, :, :heads], parts[:, :, heads : heads + 1]]
    if norms is not None:  # rounded after the norm, as a layer of its own would do
        turning = [normed(x, weight) for x, weight in zip(turning, norms)]
        if dtype != torch.float32:
            turning = [x.to(dtype) for x in turning]
    first, second = torch.cat([x.double() for x in turning], dim=2).chunk(2, dim=-1)
    cos, sin = (x[positions][:, None, None].double() for x in rotary)
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    # A number that is rounded twice may be one step off where the first rounding was a near tie.
    limit = (1.02 if norm else 0.51) * torch.finfo(dtype).eps * max(1, exact.abs().max()) + 1e-6
    assert q.shape == (tokens, groups * heads, dim) and q.is_contiguous()
    assert (q.double() - exact[:, :, :heads].flatten(1, 2)).abs().max() < limit
    flat = keys.flatten(0, 1), values.flatten(0, 1)
    assert (flat[0][slots].double() - exact[:, :, heads]).abs().max() < limit
    assert torch.equal(flat[1][slots], parts[:, :, heads + 1])
    others = [slot for slot in range(blocks * block_tokens) if slot not in slots.tolist()]
    assert all(memory[others].isnan().all() for memory in flat), "no other place is written"


def test_no_tokens_are_no_launches():
    assert add_norm(torch.empty(0, 8), None, None, torch.ones(8), EPS).shape == (0, 8)


def launch_all() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.empty(3, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
        add_norm(x, None, None, weight, EPS)
        add_norm(x, x, weight, weight, EPS)
        for heads, groups, dim in ((4, 8, 128), (7, 4, 64), (5, 2, 80)):
            qkv, cos = torch.empty(3, (heads + 2) * groups * dim, dtype=dtype), torch.empty(9, dim // 2)
            keys, places = torch.empty(2, 16, groups, dim, dtype=dtype), torch.empty(3, dtype=torch.int64)
            weights = torch.empty(2, dim, dtype=dtype)
            place_heads(qkv, None, EPS, (cos, cos), (places, places), (keys, keys))
            place_heads(qkv, (weights[0], weights[1]), EPS, (cos, cos), (places, places), (keys, keys))


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_and_stay_in_registers(programs, arch):
    launches = compiled_launches(programs, __file__, arch)
    assert len(launches) == 16 and not any(launch.stack for launch in launches)
    assert max(launch.registers for launch in launches) <= 128
    bfloat16 = launches[:2]
    assert all("v4.b32" in launch.ptx for launch in bfloat16), "loads are 16 bytes of a thread each"
