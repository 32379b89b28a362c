"""All checks by worth: what is most telling for its seconds comes first. Seconds are those on a GPU, about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpu_checks.isolation import Check

NOT_SHOWN = (
    "NCCL between ranks: its order, its hangs, its speed; collectives inside CUDA graphs",
    "that fusion saves time: ranks on one GPU fill each other's bubbles",
    "transfers between GPUs and nodes: NVLink, peer copies, network",
    "sequences, caches and models of the size that several GPUs hold",
)
PROBE = Check("probe", "probe:check_machine", {}, 15, 90)


def all_checks() -> list[Check]:
    """What `--only` and `--budget` choose from."""
    return list(_checks())


def _checks() -> Iterator[Check]:
    yield PROBE
    yield from _basics("float32")
    yield from _basics("bfloat16")
    yield _check("one_rank_float32", "programs:check_one_rank", 25, dtype="float32")
    yield _check("one_rank_bfloat16", "programs:check_one_rank", 25, dtype="bfloat16")
    yield _check("shared_pipelines", "programs:check_shared", 60, layouts="pipelines")
    yield _check("shared_cut", "programs:check_shared", 60, layouts="cut")
    for mode in ("kv", "tokens"):
        yield _check(f"move_float32_{mode}", "migration:check_move", 8, kind="float32", mode=mode)
    yield _check("fused_adam", "layers:check_fused_adam", 5)
    yield _check("flashinfer", "layers:check_library_attention", 120, name="flashinfer", block_tokens=16)
    yield _check("flash_attn", "layers:check_library_attention", 8, name="flash_attn", block_tokens=256)
    yield _check("transformer_engine", "layers:check_transformer_engine", 20)
    yield _triton("sampler_parity", "sampling:check_parity", 8)
    yield _check("waits", "waits:check_waits", 15)
    yield _check("kept_and_released", "kept:check_kept", 90)
    for size in ("1b", "8b"):
        yield _check(f"decode_{size}_16", "speed:check_decode", 30, size=size, block_tokens=16)
    for tokens in (8192, 2048, 4096, 16384):
        yield _check(f"stage_{tokens}", "training_speed:check_stage", 10, tokens=tokens)
    yield _triton("sampler_speed", "sampling:check_speed", 6)
    yield _check("head_8192", "training_speed:check_head", 10, tokens=8192)
    yield _check("optimizer", "training_speed:check_optimizer", 8)
    yield _check("weights_to_and_fro", "training_speed:check_weights", 8)
    for size in ("1b", "8b"):
        yield _check(f"decode_{size}_long", "speed:check_long_contexts", 40, size=size)
    yield _check("block_copies", "migration:check_block_copies", 6)
    yield _check("grpo_bfloat16", "programs:check_one_rank", 25, dtype="bfloat16", name="grpo")
    yield _check("resumed", "programs:check_resumed", 60)
    yield _check("not_finite", "programs:check_not_finite", 25)
    yield _check("refused_step", "training:check_refused_step", 10)
    yield _check("reshard", "training:check_reshard", 6)
    yield _check("offloaded_weights", "training:check_offloaded", 6)
    yield _check("move_bfloat16_kv", "migration:check_move", 8, kind="bfloat16", mode="kv")
    yield _check("hangs", "hang:check_hangs", 150)
    for size in ("1b", "8b"):
        yield _check(f"decode_{size}_256", "speed:check_decode", 30, size=size, block_tokens=256)


def _basics(kind: str) -> Iterator[Check]:
    yield _check(f"varlen_attention_{kind}", "generation:check_varlen", 5, kind=kind)
    for block in (16, 256):  # flash-attn takes over at 256
        sizes = {"kind": kind, "block_tokens": block}
        yield _check(f"paged_attention_{kind}_{block}", "generation:check_paged", 5, **sizes)
        yield _check(f"decode_attention_{kind}_{block}", "generation:check_decode_attention", 5, **sizes)
        yield _check(f"engine_{kind}_{block}", "generation:check_engine", 8, **sizes)
    for block in (16, 48):
        sizes = {"kind": kind, "block_tokens": block}
        yield _triton(f"paged_kernels_{kind}_{block}", "kernels:check_paged_attention", 12, **sizes)
    yield _check(f"linear_logprobs_{kind}", "kernels:check_linear_logprobs", 6, kind=kind)
    yield _triton(f"training_kernels_{kind}", "layers:check_training_kernels", 6, kind=kind)
    yield _triton(f"layer_kernels_{kind}", "layers:check_layer_kernels", 6, kind=kind)
    yield _check(f"accumulation_{kind}", "layers:check_accumulation", 6, kind=kind)
    yield _check(f"graphs_{kind}", "generation:check_graphs", 10, kind=kind)
    yield _check(f"training_{kind}", "training:check_training", 8, dtype=kind)
    yield _check(f"split_backward_{kind}", "training:check_split_backward", 6, dtype=kind)


def _check(name: str, function: str, seconds: float, /, **arguments: Any) -> Check:
    return Check(name, function, arguments, seconds, 4 * seconds + 30)


def _triton(name: str, function: str, seconds: float, /, **arguments: Any) -> Check:
    """A check that launches Triton kernels itself."""
    return replace(_check(name, function, seconds, **arguments), rehearsed=False)
