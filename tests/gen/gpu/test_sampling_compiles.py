"""The sampler's kernels are compiled for GPUs that are not there."""

from __future__ import annotations

import torch
from testkit.triton_compile import compiled_launches


def launch_all() -> None:
    from rlhfuse.gen.gpu import sampling
    from rlhfuse.gen.gpu.draws import DrawInputs

    for dtype in (torch.float32, torch.bfloat16):
        for rows, vocab in ((1, 128_256), (256, 262_144), (5, 301)):
            inputs = DrawInputs(rows, torch.empty(DrawInputs.columns(0) * rows, dtype=torch.int32))
            sampling.draw(torch.empty(rows, vocab, dtype=dtype), inputs, torch.empty(2, 256, dtype=torch.int32))
    sampling.feed(torch.empty(256, dtype=torch.int32), torch.empty(256, dtype=torch.int32))


def test_kernels_compile_for_gpus():
    launches = compiled_launches(__file__, "launch_all")
    assert len(launches) == 19 and {launch.kernel for launch in launches} == {"_cutoffs", "_scores", "_merge", "_feed"}
    assert all(launch.stack == 0 for launch in launches), "registers spill"
