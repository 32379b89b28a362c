"""Sums and gradient of tiles of logits as Triton kernels: the same as torch's, in the interpreter; and compiled."""

import pytest
import torch
from testkit import triton_interpreter  # noqa: F401
from testkit.triton_compile import compiled_launches

from rlhfuse.models.logprobs import tile_sums
from rlhfuse.models.logprobs import tile_sums_triton as kernels

ROWS, COLUMNS = 5, 4500  # more than two blocks


def drawn(seed: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are large, and targets: before the tile, at both its ends, behind it and far behind."""
    generator = torch.Generator().manual_seed(seed)
    return 20 * torch.randn(ROWS, width, generator=generator), torch.tensor([-3, 0, width - 1, width, width + 9000])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("width", [COLUMNS, 1, 2048, 2049])
def test_sums_of_a_tile(width, temperature):
    logits, targets = drawn(0, width)
    ours = kernels.tile_sums(logits.clone(), targets, temperature)
    wanted = tile_sums.tile_sums(logits, targets, temperature)
    for name, a, b in zip(("top", "total", "moment", "picked"), ours, wanted):
        assert torch.allclose(a, b, rtol=2e-6, atol=1e-6), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("width", [COLUMNS, 7])
def test_gradient_of_a_tile(width, entropy, dtype):
    logits, targets = drawn(0, width)
    z = logits / 0.7
    log_total, upstream = z.logsumexp(1), torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1))
    share = z.softmax(1)
    given = log_total, log_total - (share * z).sum(1), upstream[0], upstream[1] if entropy else None
    ours = kernels.tile_gradient(logits.clone(), targets, 0.7, given, torch.empty(logits.shape, dtype=dtype))
    wanted = tile_sums.tile_gradient(logits, targets, 0.7, given, torch.empty(logits.shape))
    assert ours.dtype == dtype  # the interpreter cuts bfloat16 off
    bound = 1e-5 if dtype == torch.float32 else 2.0**-7
    assert (ours.float() - wanted).abs().max() <= bound * wanted.abs().max()


def launch_all() -> None:
    for width in (6528, 77):
        logits, targets = torch.zeros(9, width), torch.zeros(9, dtype=torch.int64)
        sums = kernels.tile_sums(logits, targets, 1.0)
        for dtype in (torch.float32, torch.bfloat16):
            for entropy in (None, sums[2]):
                out = torch.empty(logits.shape, dtype=dtype)
                kernels.tile_gradient(logits, targets, 0.7, (sums[0], sums[1], sums[3], entropy), out)


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_without_spills(programs, arch):
    launches = compiled_launches(programs, __file__, arch)
    assert len(launches) == 10 and {launch.kernel for launch in launches} == {"_sums", "_gradient"}
    assert not any(launch.stack for launch in launches), launches
