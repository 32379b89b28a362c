"""The checks of a GPU, rehearsed on CPU: what is right is found to be so, and what is wrong is found."""

import json
import os
from dataclasses import replace
from pkgutil import resolve_name

import pytest
import torch
from gpu_checks import catalog, speed
from gpu_checks.bench import Bench
from gpu_checks.result import CheckFailed

KINDS = ("float32", "bfloat16")
GOOD = (  # they compare, and what they find is good
    *(f"{name}_{kind}" for name in ("linear_logprobs", "layer_kernels") for kind in KINDS),
    *(f"{name}_{kind}" for name in ("training_kernels", "accumulation", "training") for kind in KINDS),
    *(f"paged_attention_{kind}_{block_tokens}" for kind in KINDS for block_tokens in (16, 256)),
    *("fused_adam", "sampler_parity", "split_backward_bfloat16", "refused_step", "graphs_float32"),
    *("move_float32_kv", "move_float32_tokens", "recomputed_bfloat16"),
)
TIMED = (
    "rates",
    "kernels_8192",
    "stage_500",
    "head_8192",
    "optimizer",
    "weights_to_and_fro",
    "sampler_speed",
    "attention_triton",
)


def rehearse(bench, name: str) -> dict:
    """What the check of that name finds in this process."""
    check = next(check for check in catalog.all_checks() if check.name == name)
    return resolve_name(f"gpu_checks.{check.function}")(bench, **check.arguments)


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_is_found_to_be_so(bench, name):
    found = rehearse(bench, name)
    assert "skipped" not in found and found.get("tokens") == found.get("equal_tokens", found.get("tokens"))


def other_draw(draw):
    def drawn(logits, batch):
        found = draw(logits, batch)()
        found[0] = (found[0] + 1) % logits.shape[1]
        return lambda: found

    return drawn


def other_gradient(reference):
    def computed(*arguments):
        found = reference(*arguments)
        next(iter(found["gradients"].values())).view(-1)[0] += 1.0
        return found

    return computed


FAULTS = {  # check: what is replaced, by what, and what the check says of it
    "paged_attention_float32_16": (
        "gpu_checks.generation.reference_attention",
        lambda formula: lambda q, k, v, offset: formula(q, k, v, offset - 1),
        '"decode": .*"mixed": ',
    ),
    "layer_kernels_float32": (
        "rlhfuse.models.layers.decode_layer.add_norm",
        lambda add_norm: lambda *arguments: 1.1 * add_norm(*arguments),
        '"add_norm": 0.',
    ),
    "accumulation_float32": (
        "gpu_checks.layers.add_product",
        lambda _: lambda total, a, b: total.add_(a @ b, alpha=0.9),
        '"product": 0.',
    ),
    "fused_adam": (
        "rlhfuse.parallel.optimizer.ModelOptimizer.step",
        lambda step: lambda self, lr: step(self, 1.1 * lr),
        "weights",
    ),
    "recomputed_float32": (
        "rlhfuse.models.stack.cpu_ops.CpuOps.norm",
        lambda norm: lambda self, x, delta, *more: norm(self, x if delta is not None else 1.1 * x, delta, *more),
        '"selective": [1-9]',
    ),
    "sampler_parity": ("gpu_checks.sampling.device_draw", other_draw, '"other_tokens": 12'),
    "training_float32": ("gpu_checks.training.training_reference", other_gradient, "worst_gradient"),
    "nccl_captured": ("gpu_checks.nccl._recorded", lambda _: lambda bench, work: lambda: None, "different"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_found(bench, monkeypatch, name):
    place, fault, told = FAULTS[name]
    monkeypatch.setattr(place, fault(resolve_name(place)))
    with pytest.raises(CheckFailed, match=told):
        rehearse(bench, name)


def test_what_is_not_here_is_skipped_by_name(bench):
    assert all("CUDA" in rehearse(bench, name)["skipped"] for name in ("flashinfer", "decode_8b_flashinfer"))


@pytest.mark.parametrize("name", TIMED)
def test_what_training_does_is_timed(bench, name):
    found = json.loads(json.dumps(rehearse(bench, name)))
    assert all(one["seconds"] != 0 and one["bytes"] + one["flops"] >= 0 for one in found["figures"])


def test_decode_and_prefill_are_measured_on_a_tiny_shape(bench):
    found = speed.check_decode(bench, "8b")
    names = [one["name"] for one in found["figures"]]
    assert names == ["decode tiny 1 x 40", "decode tiny 3 x 40", "prefill tiny", "prefill tiny 1 x 16"]
    assert all(one["seconds"] > 0 for one in found["figures"])


def test_a_shape_too_large_for_the_card_is_skipped_by_name(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16 << 30, 24 << 30))
    monkeypatch.setattr(Bench, "where", torch.device("cuda"))
    found = speed.check_decode(replace(bench, kind="cuda"), "8b")
    assert set(found) == {"skipped"} and "16384 MiB are free" in found["skipped"]


@pytest.mark.slow
@pytest.mark.parametrize("name", "shared_pipelines shared_cut resumed not_finite one_rank grpo nccl_speedup".split())
def test_whole_programs_are_rehearsed(call, name):
    code, report = call("--device", "cpu", "--names", f"{name}*")
    assert code == 0 and len(report["checks"]) > 1, report


@pytest.mark.gpu
def test_every_check_is_good_on_a_gpu(call):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    code, report = call(CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7"))
    assert code == 0, [check for check in report["checks"] if not check["ok"]]
