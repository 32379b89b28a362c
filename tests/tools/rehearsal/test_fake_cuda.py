"""Fake CUDA tensors: what holds memory, what is known of integers, and which faults raise as they do on CUDA."""

import json

import pytest
from rehearsal.shim import obstacle

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())

END = "from rlhfuse.base.errors import leave\nleave(0)"  # as a process with a gloo group must
BEGIN = """
from rehearsal.shim import load_shim
load_shim()
import json, torch, torch.distributed as dist, warnings
warnings.filterwarnings("ignore")
from torch.testing._internal.distributed.fake_pg import FakeStore
from rehearsal.device import install
from rehearsal.memory import Meter, DEVICE
from rehearsal.tensors import FakeCuda
mode = FakeCuda(Meter())
install(mode)
dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
cuda = torch.device("cuda", 0)
found = {}
def attempt(name, work):
    try:
        work()
        found[name] = ""
    except Exception as error:
        found[name] = str(error)
"""
FAULTS = """
with mode:
    w = torch.empty(8, 8, device=cuda, dtype=torch.bfloat16)
    rows = torch.arange(4, device=cuda)
    attempt("a float on the CPU", lambda: w * torch.ones(8, 8))
    attempt("an index on the CPU", lambda: torch.nn.functional.embedding(torch.arange(4), w))
    attempt("a shape", lambda: w @ torch.empty(4, 8, device=cuda, dtype=torch.bfloat16))
    attempt("a product of two dtypes", lambda: torch.nn.functional.linear(torch.empty(4, 8, device=cuda), w))
    single = torch.empty(4, 8, device=cuda)
    added = lambda total, a: torch.addmm(total, a, w, out_dtype=torch.float32, out=single)
    attempt("right: a product added in float32", lambda: added(single, w[:4]))
    attempt("a product added to another dtype", lambda: added(single.half(), w[:4]))
    attempt("an added product of two dtypes", lambda: added(single, single))
    attempt("an int32 index", lambda: w.index_copy_(0, rows.int(), w[:4]))
    attempt("a copy that is too long", lambda: w[:2].copy_(w[:4]))
    attempt("right", lambda: torch.nn.functional.linear(w[:4], w).index_copy_(0, rows, w[4:]))
    dist.all_reduce(w.t())
    dist.all_reduce(w)
    dist.all_reduce(torch.empty(1 << 20))
"""
TRITON = """
import triton, triton.language as tl
@triton.jit
def double(x, out, stride, columns, block: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, block)
    tl.store(out + at, tl.load(x + at) * 2)
@torch.library.custom_op("rehearsal_test::double", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    double[(len(x),)](x, out, x.stride(0), x.shape[1], block=64)
    return out
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return doubled(x)
    @staticmethod
    def backward(ctx, gradient):
        return doubled(gradient)
with mode:
    x = torch.empty(8, 64, device=cuda, requires_grad=True)
    attempt("right", lambda: Double.apply(x).sum().backward())
    wide = torch.empty(8, 128, device=cuda)[:, :64]
    attempt("a stride that is given", lambda: double[(8,)](wide, wide, 128, 64, block=64))
    attempt("a stride that is not", lambda: double[(8,)](wide, wide, 64, 64, block=64))
    attempt("on the CPU", lambda: double[(8,)](x.detach(), torch.ones(8, 64), 64, 64, block=64))
    attempt("no grid", lambda: double[(0,)](x, x, 64, 64, block=64))
found["launches"] = dict(mode.launches)
"""
MEMORY = """
with mode:
    mode.meter.reset()
    before = mode.meter.now[DEVICE]
    w = torch.nn.Parameter(torch.empty(1000, 1000, device=cuda, dtype=torch.bfloat16))
    held = mode.meter.now[DEVICE] - before
    (torch.empty(500, 1000, device=cuda, dtype=torch.bfloat16) @ w).sum().backward()
    peak = mode.meter.peak[DEVICE] - before
    found["gradient"] = str(w.grad.device)
    after = mode.meter.now[DEVICE] - before
    w.grad.untyped_storage().resize_(0)
    resized = mode.meter.now[DEVICE] - before
    pinned = torch.empty(3 << 20, dtype=torch.bfloat16, pin_memory=True)
    found["bytes"] = [held, peak, after, resized, mode.meter.host_bytes, mode.meter.reserved_bytes]
    borders = torch.tensor([0, 3, 5, 9]).to(cuda)
    lengths = borders.diff()
    found["lengths"] = lengths.tolist()
    found["rows"] = torch.repeat_interleave(torch.arange(3, device=cuda), lengths).tolist()
    found["unknown"] = torch.empty(2, device=cuda).exp().tolist()
    found["reads"] = sum(mode.reads.values())
"""


@pytest.fixture
def rehearsed(programs, tmp_path, monkeypatch):
    """Runs code in a process with a fake GPU; returns what that leaves in `found`."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def rehearsed(code: str) -> dict:
        file = tmp_path / "code.py"  # triton reads a kernel's source from its file
        file.write_text(f"{BEGIN}{code}\nfound['problems'] = list(mode.problems)\nprint(json.dumps(found))\n{END}")
        done = programs.python(file)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return rehearsed


def test_planted_faults_raise_or_are_listed(rehearsed):
    found = rehearsed(FAULTS)
    assert found["right"] == found["right: a product added in float32"] == ""
    assert "bfloat16 and torch.float16" in found["a product added to another dtype"]
    assert "bfloat16 and torch.float32" in found["an added product of two dtypes"]
    assert "device" in found["a float on the CPU"] and "device" in found["an index on the CPU"]
    assert "same reduction dim" in found["a shape"]
    assert "bfloat16 and torch.float32" in found["a product of two dtypes"]
    assert "torch.int32, not torch.int64" in found["an int32 index"]
    assert found["a copy that is too long"]
    transposed, on_cpu = found["problems"]
    assert "not contiguous" in transposed and "tensor on the CPU" in on_cpu


def test_triton_kernels_are_counted_and_their_arguments_looked_at(rehearsed):
    pytest.importorskip("triton")
    found = rehearsed(TRITON)
    assert found["right"] == "" and found["a stride that is given"] == ""
    assert "not contiguous" in found["a stride that is not"]
    assert "out is on the cpu" in found["on the CPU"] and "grid" in found["no grid"]
    assert found["launches"]["double"] >= 3


def test_memory_is_counted_and_integers_are_known(rehearsed):
    found = rehearsed(MEMORY)
    weight, rows = 2_000_384, 1_000_448  # in steps of 512 bytes
    held, peak, after, resized, host, reserved = found["bytes"]
    assert held == weight and after == 2 * weight and resized == weight
    assert peak >= 2 * weight + rows and found["gradient"] == "cuda:0"
    assert (host, reserved) == (6 << 20, 8 << 20)
    assert found["lengths"] == [3, 2, 4] and found["rows"] == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert found["unknown"] == [1.0, 1.0]
    assert found["reads"] == 4  # three lists, and the sum of the lengths
