"""All checks by worth: what is most telling for its seconds comes first. Seconds are those on a GPU, about.

Does it work, and how fast; on two and more GPUs `nccl_*`; whole programs; hazards; the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpu_checks.isolation import Check
from gpu_checks.speed import LONG

# What so many GPUs show, and fewer do not.
SHOWN_BY = (
    (2, "NCCL between ranks: its order, its hangs, its speed; collectives inside CUDA graphs"),
    (2, "that fusion saves time: ranks on one GPU fill each other's bubbles"),
    (2, "transfers between GPUs: NVLink, peer copies"),
    (4, "stages between first and last, tensor ranks and replicas at once, over NCCL"),
    (8, "a whole node: its pipelines, sums of eight"),
    (9, "transfers between nodes; models and batches of the size that a cluster holds"),
)
BASICS = ("training_kernels", "layer_kernels", "accumulation", "linear_logprobs", "graphs")  # of the first call
BUILD = 300.0  # seconds that compiling flashinfer's kernels may take
PROBE = replace(Check("probe", "probe:check_machine", {}, 15, 90), eager=True)


def not_shown(gpus: int) -> list[str]:
    """What so many GPUs cannot show."""
    return [text for needed, text in SHOWN_BY if needed > gpus]


def tiers(gpus: int) -> dict[str, list[Check]]:
    """The checks of a machine with so many GPUs, in order."""
    every = {"first": _first(), "nccl": _nccl(gpus), "programs": _programs(), "hazards": _hazards(), "rest": _rest()}
    return {name: [check for check in checks if check.gpus <= gpus] for name, checks in every.items()}


def all_checks(gpus: int = 8) -> list[Check]:
    """What `--names` and `--budget` choose from."""
    return [check for checks in tiers(gpus).values() for check in checks]


def _first() -> Iterator[Check]:
    yield PROBE
    yield _check("host", "host:check_host", 4)
    yield _check("rates", "figures:check_rates", 4, small=True)
    yield _check("kernels_8192", "host:check_kernels", 4, tokens=8192)
    for tokens, sequence in ((500, 500), (1024, 512), (2048, 512), (4096, 1024), (8192, 2048)):
        yield _check(f"stage_{tokens}", "training_speed:check_stage", 8, tokens=tokens, sequence=sequence)
    yield _run("one_rank_bfloat16", "programs:check_one_rank", 25, dtype="bfloat16")
    basics = {check.name: check for check in _basics("bfloat16")}
    for name in ("paged_attention_bfloat16_16", *(f"{name}_bfloat16" for name in BASICS)):
        yield basics[name]
    yield _triton("sampler_parity", "sampling:check_parity", 4)
    yield _check("decode_8b", "speed:check_decode", 40, size="8b")
    yield _check("attention_triton", "speed:check_attention", 6, name="triton")
    yield _check("head_8192", "training_speed:check_head", 8, tokens=8192)
    yield _check("optimizer", "training_speed:check_optimizer", 6)
    yield _check("weights_to_and_fro", "training_speed:check_weights", 6)
    yield _check("decode_8b_long", "speed:check_decode", 35, size="8b", points=LONG)


def _nccl(gpus: int) -> Iterator[Check]:
    ranks = next(count for count in (8, 4, 2, 1) if count <= max(gpus, 1))
    for name, function, seconds in (("links", "links", 20), ("captured", "captured", 15), ("switch", "switch", 15)):
        yield _several(f"nccl_{name}", f"nccl:check_{function}", seconds, ranks=max(ranks, 2))
    yield _several("nccl_moved", "nccl:check_moved", 20)
    few = min(max(ranks, 2), 4)  # the tiny model has so many layers
    yield _several("nccl_pipelines", "programs:check_apart", 50, layouts="pipelines", ranks=few)
    yield replace(_several("nccl_cut", "programs:check_apart", 50, layouts="cut", ranks=4), gpus=4)
    yield _several("nccl_speedup", "programs:check_speedup", 80, ranks=max(ranks, 2))


def _programs() -> Iterator[Check]:
    sizes: dict[str, Any] = {"kind": "bfloat16", "block_tokens": 16}
    library = _check("flashinfer", "generation:check_paged", 12, BUILD, library="flashinfer", **sizes)
    yield replace(library, background=True)
    yield _run("shared_pipelines", "programs:check_shared", 50, layouts="pipelines")
    yield _run("shared_cut", "programs:check_shared", 50, layouts="cut")
    for mode in ("kv", "tokens"):
        yield _check(f"move_float32_{mode}", "migration:check_move", 4, kind="float32", mode=mode, small=True)
    yield _run("resumed", "programs:check_resumed", 60)
    yield _run("grpo_bfloat16", "programs:check_one_rank", 25, dtype="bfloat16", name="grpo")
    yield _check("attention_flashinfer", "speed:check_attention", 6, BUILD, name="flashinfer")
    yield _check("decode_8b_flashinfer", "speed:check_decode", 40, BUILD, size="8b", library="flashinfer")


def _hazards() -> Iterator[Check]:
    yield _run("not_finite", "programs:check_not_finite", 25)
    yield _check("refused_step", "training:check_refused_step", 3, small=True)
    yield _check("decode_1b", "speed:check_decode", 25, size="1b")
    yield _check("decode_1b_eager", "speed:check_decode", 25, size="1b", graphs=False)
    yield _triton("sampler_speed", "sampling:check_speed", 4)
    yield _check("move_bfloat16_kv", "migration:check_move", 4, kind="bfloat16", mode="kv", small=True)
    yield _check("fused_adam", "layers:check_fused_adam", 3, small=True)


def _rest() -> Iterator[Check]:
    first = {check.name for check in _first()}
    yield from (check for check in _basics("bfloat16") if check.name not in first)
    yield from _basics("float32")
    yield _run("one_rank_float32", "programs:check_one_rank", 25, dtype="float32")
    yield _check("decode_8b_256", "speed:check_decode", 40, size="8b", block_tokens=256)


def _basics(kind: str) -> Iterator[Check]:
    for block in (16, 48, 256):
        sizes: dict[str, Any] = {"kind": kind, "block_tokens": block, "small": True}
        yield _check(f"paged_attention_{kind}_{block}", "generation:check_paged", 5, **sizes)
        if block != 48:
            yield _check(f"engine_{kind}_{block}", "generation:check_engine", 4, **sizes)
    yield _check(f"linear_logprobs_{kind}", "layers:check_linear_logprobs", 3, kind=kind, small=True)
    yield _check(f"training_kernels_{kind}", "layers:check_training_kernels", 3, kind=kind, small=True)
    yield _triton(f"layer_kernels_{kind}", "layers:check_layer_kernels", 3, kind=kind)
    yield _check(f"accumulation_{kind}", "layers:check_accumulation", 3, kind=kind, small=True)
    yield _check(f"graphs_{kind}", "generation:check_graphs", 6, kind=kind, small=True)
    yield _check(f"training_{kind}", "training:check_training", 3, dtype=kind, small=True)
    yield _check(f"split_backward_{kind}", "training:check_split_backward", 3, dtype=kind, small=True)
    yield _check(f"recomputed_{kind}", "training:check_recomputed", 4, dtype=kind, small=True)


def _check(
    name: str, function: str, seconds: float, build: float = 0.0, /, *, small: bool = False, **arguments: Any
) -> Check:
    """`build`: seconds that it may compile for, beside its own."""
    return Check(name, function, arguments, seconds, 4 * seconds + 30 + build, small=small)


def _triton(name: str, function: str, seconds: float, /, **arguments: Any) -> Check:
    """A small check that launches Triton kernels itself."""
    return replace(_check(name, function, seconds, small=True, **arguments), rehearsed=False)


def _run(name: str, function: str, seconds: float, /, **arguments: Any) -> Check:
    """Whole programs, as a user starts them."""
    return replace(_check(name, function, seconds, **arguments), eager=True)


def _several(name: str, function: str, seconds: float, /, **arguments: Any) -> Check:
    return replace(_run(name, function, seconds, **arguments), gpus=2)
