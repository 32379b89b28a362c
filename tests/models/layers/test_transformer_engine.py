"""Models with Transformer Engine's layers: who gets them, and that weights are named, cut and moved as without.

It cannot be installed without a GPU; layers with its signatures stand in for it, and compute by plain formulas.
"""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from testkit.stages import ranks_of
from testkit.tiny import write_checkpoint

from rlhfuse.base.errors import InputError
from rlhfuse.models.layers.transformer_engine import (
    LayerSlots,
    RotatedAttention,
    choose_layers,
    transformer_engine_slots,
)
from rlhfuse.parallel.weight_gradients import fuse_accumulation

POOL_RANKS = 2

FACTS = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")


class Linear(torch.nn.Module):
    """te.pytorch.Linear as Megatron wraps it: of keyword arguments, with extra state, and no Megatron class."""

    def __init__(self, inputs: int, outputs: int, *, config, bias: bool, skip_bias_add: bool, tp_group, **_) -> None:
        super().__init__()
        cut = dist.get_world_size(tp_group)
        inputs, outputs = (inputs, outputs // cut) if self.parallel_mode == "column" else (inputs // cut, outputs)
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim, self.weight.partition_stride = 7, 7  # whatever it says of itself
        self.bias = torch.nn.Parameter(torch.empty(outputs)) if bias else torch.Tensor()
        self.returned = self.bias if bias and skip_bias_add else None

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(3, dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        raise AssertionError("nobody has it to give")

    def forward(self, x):
        y = x @ self.weight.t()
        if self.returned is None and len(self.bias):
            y = y + self.bias
        return y, self.returned


class Column(Linear):
    parallel_mode = "column"


class Row(Linear):
    parallel_mode = "row"


class Norm:
    def __new__(cls, config, hidden_size: int, eps: float = 1e-5):
        norm = torch.nn.RMSNorm(hidden_size, eps)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


class Attention(torch.nn.Module):
    def __init__(self, config, layer_number: int, attn_mask_type, attention_type: str, **named) -> None:
        super().__init__()
        assert attn_mask_type.name == "causal" and attention_type == "self" and named["pg_collection"].tp is not None

    def forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None):
        packed = packed_seq_params
        assert attention_mask is None and packed.qkv_format == "thd" and attn_mask_type.name == "causal"
        assert packed.max_seqlen_q == packed.cu_seqlens_q.diff().max() and packed.cu_seqlens_kv is packed.cu_seqlens_q
        out = []
        for begin, end in zip(packed.cu_seqlens_q[:-1], packed.cu_seqlens_q[1:]):
            q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
            attend = torch.nn.functional.scaled_dot_product_attention
            out.append(attend(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(out).flatten(1)


def slots(rotary) -> LayerSlots:
    from megatron.core.transformer.spec_utils import ModuleSpec

    attention = ModuleSpec(module=RotatedAttention, params={"rotary": rotary, "attention": Attention})
    return LayerSlots(Column, Row, Norm, attention)


def both(rank: int, folder, layout: str, head: bool) -> list:
    """Facts, outputs and gradients of a model with our own layers, and with the others."""
    from rlhfuse.config.settings import OptimizerConfig
    from rlhfuse.config.spec import ModelSpec
    from rlhfuse.models import build
    from rlhfuse.models.stage import PackedTokens, PipelineStage
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import GroupMaker, trained_grid
    from rlhfuse.parallel.optimizer import ModelOptimizer
    from rlhfuse.parallel.optimizer_state import export_state
    from rlhfuse.parallel.whole_weights import WholeWeights
    from rlhfuse.run.rank_models import load_part

    ranks, maker, spec = ranks_of(critic=layout), GroupMaker(600), ModelSpec.from_config(folder)
    grid, device = trained_grid(ranks, "critic"), choose_device("cpu", 0, 1)
    groups = maker.for_model("critic", grid, rank)
    batch = PackedTokens.pack([[3, 14, 15, 9], [2, 6]], device.torch_device)
    found, chosen = [], build.transformer_engine_slots
    build.transformer_engine_slots = slots
    try:
        for engines in (False, True):
            kind = dict(scalar_head=head, dtype=torch.float32, device=device, transformer_engine=engines)
            model = build.build_model(spec, grid, groups, rank, **kind)
            load_part(model, folder, spec, grid, rank, head)
            named = dict(model.named_parameters())
            facts = {name: [tuple(w.shape), *(getattr(w, key, None) for key in FACTS)] for name, w in named.items()}
            classes = {type(module).__name__ for module in model.modules()}
            values, gradients = None, {}
            if layout == "d2t1p1":  # these linear layers sum over no tensor ranks
                values = PipelineStage(model, first=True, last=True, scalar_head=head).forward(batch, None)
                values.square().sum().backward()
                values = values.detach()
                gradients = {name: weight.grad.clone() for name, weight in named.items()}
            optimizer = ModelOptimizer({0: model}, OptimizerConfig(name="adam"), groups, device)
            states = sorted(one.name for one in export_state(optimizer))
            whole = WholeWeights(optimizer.modules.values())
            weights = {name: whole[name] for name in sorted(whole)}
            found.append((facts, classes, values, gradients, states, weights if rank == 0 else {}))
    finally:
        build.transformer_engine_slots = chosen
    maker.close()
    return found


@pytest.mark.parametrize(
    "layout, shape", [("d2t1p1", {}), ("d2t1p1", {"model_type": "qwen2"}), ("d1t2p1", {})], ids=str
)
def test_weights_are_named_cut_kept_and_exported_as_without_them(workers, tmp_path, layout, shape):
    folder = write_checkpoint(tmp_path / "critic", scalar_head=True, seed=3, num_hidden_layers=2, **shape)
    for rank, (ours, theirs) in enumerate(workers.run(both, folder, layout, True)):
        assert "Column" in theirs[1] and "Attention" in theirs[1] and "ColumnParallelLinear" not in theirs[1]
        assert ours[0] == theirs[0] and ours[4] == theirs[4]
        assert not any("extra_state" in name for name in (*theirs[0], *theirs[4], *theirs[5]))
        assert ours[5].keys() == theirs[5].keys() and bool(ours[5]) == (rank == 0)
        assert all(torch.equal(weight, theirs[5][name]) for name, weight in ours[5].items())
        if layout == "d2t1p1":
            assert torch.allclose(ours[2], theirs[2], atol=1e-5)
            for name, gradient in ours[3].items():
                assert torch.allclose(gradient, theirs[3][name], atol=1e-4, rtol=1e-4), name


PACKAGE = {  # what importing it does
    "there": "",
    "absent": None,
    "of_another_torch": "raise ImportError('transformer_engine_torch.so: undefined symbol:\\n _ZN3c10')",
    "without_library": "raise OSError('libtransformer_engine.so: cannot open shared object file')",
}


@pytest.mark.parametrize(
    "package, wanted, device, dtype, head_dim, expected",
    [
        ("there", "auto", "cuda", "bfloat16", 128, "have not been measured beside them"),
        ("there", "transformer_engine", "cuda", "bfloat16", 64, True),
        ("there", "local", "cuda", "bfloat16", 128, ""),
        ("there", "auto", "cpu", "bfloat16", 128, ""),
        ("absent", "auto", "cuda", "bfloat16", 128, "Transformer Engine is not installed"),
        ("of_another_torch", "auto", "cuda", "bfloat16", 128, "cannot be imported: .*undefined symbol: _ZN3c10"),
        ("without_library", "auto", "cuda", "bfloat16", 128, "cannot be imported: libtransformer_engine.so: cannot"),
        ("there", "auto", "cuda", "float32", 128, "computes in 16 bits"),
        ("there", "auto", "cuda", "bfloat16", 260, "multiples of 8 up to 256, not 260"),
        ("absent", "transformer_engine", "cuda", "bfloat16", 128, "engine: Transformer Engine is not installed;"),
        ("of_another_torch", "transformer_engine", "cuda", "bfloat16", 128, "undefined symbol: _ZN3c10; use auto or"),
        ("without_library", "transformer_engine", "cuda", "bfloat16", 128, "cannot open shared object file; use auto"),
        ("there", "transformer_engine", "cpu", "bfloat16", 128, "runs on CUDA alone; use auto or local"),
        ("there", "transformer_engine", "cuda", "float32", 128, "in 16 bits, not in float32; use auto or local"),
    ],
)
def test_who_gets_its_layers(monkeypatch, tmp_path, package, wanted, device, dtype, head_dim, expected):
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)  # so that what is imported here is forgotten at the end
        del sys.modules[name]
    if (line := PACKAGE[package]) is not None:
        (tmp_path / "transformer_engine/pytorch").mkdir(parents=True)
        (tmp_path / "transformer_engine/__init__.py").touch()
        (tmp_path / "transformer_engine/pytorch/__init__.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = wanted, device, dtype, [64, head_dim]
    if wanted == "transformer_engine" and expected is not True:
        with pytest.raises(InputError, match=expected) as caught:
            choose_layers(*arguments)
        assert "\n" not in str(caught.value)
        return
    chosen = choose_layers(*arguments)
    assert chosen.transformer_engine == (expected is True)
    line = chosen.line()
    assert "Transformer Engine's" in line if expected is True else re.search(expected, line)
    assert bool(line) == bool(expected) and "\n" not in line


def test_its_products_add_weight_gradients_to_float32_sums():
    """As Megatron would have it say at its making: `fuse_wgrad_accumulation=config.gradient_accumulation_fusion`."""
    layer, model = torch.nn.Module(), torch.nn.Module()
    layer.parallel_mode, layer.fuse_wgrad_accumulation, model.layer = "column", False, layer
    fuse_accumulation(model)
    assert layer.fuse_wgrad_accumulation is True
    del layer.fuse_wgrad_accumulation
    with pytest.raises(InputError, match="has no fuse_wgrad_accumulation: .*set trainer.transformer_impl=local"):
        fuse_accumulation(model)


def test_the_slots_are_megatrons_wrappers():
    from megatron.core.extensions import transformer_engine as wrapped

    column, row, norm, attention = transformer_engine_slots(SimpleNamespace())
    assert column is wrapped.TEColumnParallelLinear and row is wrapped.TERowParallelLinear and norm is wrapped.TENorm
    assert attention.module is RotatedAttention and attention.params["attention"] is wrapped.TEDotProductAttention
