"""The choice of attention over cache blocks by name, and what libraries get, over doubles that compute."""

import inspect
import types
from dataclasses import replace
from itertools import starmap
from unittest import mock

import pytest
import torch
from testkit.paged_case import PagedCase, causal
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.models.attention import backends
from rlhfuse.models.attention.backends import Backend, choose, choose_paged
from rlhfuse.models.attention.packed import flash_attention
from rlhfuse.models.attention.packed.sequences import PackedShape
from rlhfuse.models.attention.paged import flashinfer as flashinfer_attention
from rlhfuse.models.attention.paged import triton
from rlhfuse.models.attention.paged.cache import CacheShape, PagedQueries

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPE = CacheShape(torch.bfloat16, CUDA, 8, 2, 64, 16, 32)
USE = "attention of generation"


class FlashInferDouble(types.ModuleType):
    """flashinfer 0.6.4 as far as it is called: its arguments by name, its results by the formula."""

    def __init__(self) -> None:
        super().__init__("flashinfer")
        double = self
        self.decode = types.SimpleNamespace(xqa_batch_decode_with_kv_cache=self.xqa)
        self.plans = self.runs = 0

        class BatchPrefillWithPagedKVCacheWrapper:
            def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
                assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

            def plan(
                self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
                num_kv_heads, head_dim_qk, page_size, *, causal, sm_scale, q_data_type,
            ):  # fmt: skip
                double.plans += 1
                on_host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
                assert all(x.dtype == torch.int32 and not x.is_cuda for x in (*on_host, paged_kv_indices))
                assert (
                    causal and sm_scale == head_dim_qk**-0.5 and ((1 <= on_host[2]) & (on_host[2] <= page_size)).all()
                )
                self.facts = *(x.tolist() for x in on_host), paged_kv_indices, num_qo_heads, num_kv_heads, q_data_type

            def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
                double.runs += 1
                queries, blocks, last, indices, heads, kv_heads, dtype = self.facts
                keys, values = paged_kv_cache
                assert q.shape[1] == heads and keys.shape[2] == kv_heads and q.dtype == keys.dtype == dtype
                out = []
                for s, ends in enumerate(last):
                    places = indices[blocks[s] : blocks[s + 1]].long()
                    length = (len(places) - 1) * keys.shape[1] + ends
                    k, v = (x[places].flatten(0, 1)[:length] for x in (keys, values))
                    out.append(causal(q[queries[s] : queries[s + 1]], k, v).to(q.dtype))
                return torch.cat(out)

        self.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper

    def xqa(
        self, *, query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale,
        kv_layout,
    ):  # fmt: skip
        keys, values = kv_cache
        assert workspace_buffer.dtype == torch.uint8 and not workspace_buffer[: 8 << 20].any()
        assert seq_lens.dtype == torch.uint32 and block_tables.dtype == torch.int32 and kv_layout == "NHD"
        assert bmm1_scale == query.shape[-1] ** -0.5 and bmm2_scale == 1.0
        assert max_seq_len == block_tables.shape[1] * keys.shape[1]
        out = []
        for row, (table, length) in enumerate(zip(block_tables.long(), seq_lens.tolist())):
            out.append(causal(query[row : row + 1], *(x[table].flatten(0, 1)[:length] for x in (keys, values))))
        return torch.cat(out).to(query.dtype)


@pytest.fixture
def flashinfer(monkeypatch) -> FlashInferDouble:
    """An installed flashinfer and a Hopper that is not there."""
    double = FlashInferDouble()
    find = flashinfer_attention.importlib.import_module
    monkeypatch.setattr(
        flashinfer_attention.importlib, "import_module", lambda name: double if name == "flashinfer" else find(name)
    )
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE", 9 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    return double


def test_flashinfer_gets_what_its_formula_needs(flashinfer):
    shape = replace(SHAPE, device=CPU, dtype=torch.float16)
    sizes = shape.heads, shape.kv_heads, shape.head_dim, shape.block_tokens
    case = PagedCase([1, 16, 1, 5, 2], [1, 16, 33, 40, 50], *sizes, shape.dtype)
    kernels = flashinfer_attention.FlashInferAttention(shape)
    assert (flashinfer.plans, flashinfer.runs) == (1, 1), "both kernels are built before the first step"

    attend = kernels.mixed(PagedQueries.of(case.tables, case.starts, case.contexts))
    for _ in range(3):  # layers
        assert (attend(case.q, case.keys, case.values) - case.expected()).abs().max() < 2e-3
    assert (flashinfer.plans, flashinfer.runs) == (2, 4), "planned once for all layers"

    case = PagedCase([1] * 5, case.contexts, *sizes, shape.dtype)
    found = kernels.decode(case.tables, torch.tensor(case.contexts, dtype=torch.int32))(case.q, case.keys, case.values)
    assert (found - case.expected()).abs().max() < 2e-3


def test_calls_fit_the_installed_flashinfer():
    library, here = pytest.importorskip("flashinfer"), FlashInferDouble()
    wrapper, double = library.BatchPrefillWithPagedKVCacheWrapper, here.BatchPrefillWithPagedKVCacheWrapper
    pairs = [(library.decode.xqa_batch_decode_with_kv_cache, here.xqa)]
    pairs += [(getattr(wrapper, name), getattr(double, name)) for name in ("__init__", "plan", "run")]
    for theirs, ours in pairs:
        known, named = (
            [p for p in inspect.signature(f).parameters.values() if p.name != "self"] for f in (theirs, ours)
        )
        missing = {p.name for p in named} - {p.name for p in known}
        assert not missing, f"{theirs} has no {missing}"
        positional = [p.name for p in named if p.kind == p.POSITIONAL_OR_KEYWORD]
        assert [p.name for p in known][: len(positional)] == positional, "those without a name stand in this order"


def test_an_old_gpu_and_a_broken_or_absent_library_are_told(flashinfer, monkeypatch):
    broken = ImportError("libcudart.so.12: cannot open shared object file")
    absent = ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer")
    for error, words in ((broken, "cannot be imported: libcudart.so.12"), (absent, "flashinfer is not installed")):
        with monkeypatch.context() as patch:
            patch.setattr(flashinfer_attention.importlib, "import_module", mock.Mock(side_effect=error))
            assert words in flashinfer_attention.obstacle(SHAPE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "not 8.0" in flashinfer_attention.obstacle(SHAPE)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("flashinfer", dict(), None),
        ("flashinfer", dict(dtype=torch.float16, head_dim=256, block_tokens=128), None),
        ("flashinfer", dict(device=CPU), "CUDA alone"),
        ("flashinfer", dict(dtype=torch.float32), "not in float32"),
        ("flashinfer", dict(head_dim=32), "a head_dim of 64, 128 or 256, not 32"),
        ("flashinfer", dict(head_dim=192), "not 192"),
        ("flashinfer", dict(block_tokens=256), "not 256"),
        ("flashinfer", dict(heads=66), "not 33"),
        ("triton", dict(device=CPU), None),
        ("triton", dict(device=CPU, head_dim=257), "not 257"),
    ],
)
def test_why_a_library_is_not_used(flashinfer, name, changes, reason):
    (row,) = (row for row in backends.PAGED if row.name == name)
    told = row.obstacle(replace(SHAPE, **changes))
    assert told == "" if reason is None else reason in told


def test_flash_attention_that_cannot_be_imported_is_told_from_one_that_is_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    shape = PackedShape(CUDA, torch.bfloat16, 64)
    assert flash_attention.obstacle(shape) == "flash-attn is not installed"
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    assert flash_attention.obstacle(shape) == "flash-attn cannot be imported: undefined symbol: _ZN3c10"


def rows(**obstacles: str) -> tuple[tuple[Backend, ...], list[str]]:
    """A table with these obstacles, and the names of what is made of it, which is the name."""
    made: list[str] = []

    def row(name: str, obstacle: str) -> Backend:
        return Backend(name, lambda shape: obstacle, lambda shape: made.append(name) or name)

    return tuple(starmap(row, obstacles.items())), made


def test_the_first_that_can_is_chosen_and_told(monkeypatch):
    table, made = rows(flashinfer="flashinfer is not installed", triton="", torch="")
    assert [row.name for row in backends.PAGED] == [row.name for row in table]
    monkeypatch.setattr(backends, "PAGED", table)
    chosen = choose_paged(SHAPE)
    assert chosen.name == chosen.kernels == "triton" and made == ["triton"]
    assert chosen.line(USE) == "attention of generation: triton; flashinfer is not installed"
    assert choose_paged(replace(SHAPE, device=CPU)).line(USE) == "attention of generation: torch"
    assert choose_paged(SHAPE, "torch").line(USE) == "attention of generation: torch"
    with pytest.raises(InputError, match="rollout.attention=flashinfer cannot serve: flashinfer is not installed; use"):
        choose_paged(SHAPE, "flashinfer")


def test_kernels_that_do_not_compile_are_passed_over_and_told(monkeypatch):
    fails = RuntimeError("Ninja build failed.\nnvcc fatal: Unsupported gpu architecture\n")
    (first, *others), _ = rows(flashinfer="", triton="")
    chosen = choose([replace(first, make=mock.Mock(side_effect=fails)), *others], SHAPE)
    assert chosen.name == "triton"
    assert chosen.passed_over == {"flashinfer": "flashinfer cannot be made ready: Ninja build failed."}


def test_triton_on_cpu_needs_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in triton.obstacle(replace(SHAPE, device=CPU))
