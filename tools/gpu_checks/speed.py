"""How near generation comes to the limits of a GPU: a decode step must read weights once and all keys and values."""

from __future__ import annotations

import json
import statistics
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpu_checks.bench import SHAPES, Bench
from gpu_checks.figures import Figure, timed, told

from rlhfuse.config.layer_weights import layer_weights
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.flops import forward_flops
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.gen.options import Attention
from rlhfuse.models.attention.backends import choose_paged
from rlhfuse.models.attention.paged.cache import CacheShape
from rlhfuse.models.attention.paged.flashinfer import obstacle as flashinfer_obstacle

ELEMENT = 2  # bytes of a bfloat16
RESPONSE = 32  # tokens of a sample beside those that it decodes while others still prefill
STEP_TOKENS = 8192  # of a step with prefill
PROMPTS, PROMPT = 16, 512  # of the prefill that is timed
SHORTEST = 1, 16  # of another, whose launches by the host are all that it takes
Points = tuple[tuple[int, int], ...]  # sequences, and tokens of each at a decode step
SHORT: Points = ((1, 144), (16, 144), (64, 144), (256, 144), (192, 1000))
LONG: Points = ((1, 2048), (16, 2048), (64, 2048), (1, 8192), (16, 8192))
ON_CPU: Points = ((1, 40), (3, 40))


def random_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights of one whole model under Megatron-core names, made on the device."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=device, dtype=dtype)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype) * shape[1] ** -0.5

    weights = {"embedding.word_embeddings.weight": draw(spec.vocab, spec.hidden)}
    weights["decoder.final_layernorm.weight"] = draw(spec.hidden)
    for number in range(spec.layers):
        for weight in layer_weights(spec):
            rows, (_, *columns) = sum(shape[0] for shape in weight.parts.values()), next(iter(weight.parts.values()))
            weights[f"decoder.layers.{number}.{weight.name}"] = draw(rows, *columns)
    if not spec.tied_embeddings:
        weights["output_layer.weight"] = draw(spec.vocab, spec.hidden)
    return weights


@cache
def spec_of(size: str, **changes: Any) -> ModelSpec:
    """A shape of SHAPES as the program reads it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**SHAPES[size], **changes}))
        return ModelSpec.from_config(folder)


def step_bytes(spec: ModelSpec, context_tokens: int) -> int:
    """Bytes that a decode step must read: all weights but an embedding of its own, and all keys and values."""
    lookup = 0 if spec.tied_embeddings else spec.embedding_parameters
    return (spec.parameters() - lookup) * ELEMENT + context_tokens * spec.kv_bytes_per_token(ELEMENT)


def random_prompts(spec: ModelSpec, count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts that share no prefix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, spec.vocab, (count, length), generator=generator).tolist()


def response_tokens(batch: int, context: int) -> int:
    """So many that all sequences decode together for a while before the first one ends."""
    return RESPONSE + 2 * -(-batch * context // STEP_TOKENS)


def decode_seconds(engine: Engine, batch: int, context: int) -> tuple[float, int]:
    """Median seconds of a decode step of all `batch` sequences, and the tokens in the cache at such a step."""
    params = SamplingParams(max_tokens=response_tokens(batch, context), ignore_eos=True)
    for sample, prompt in enumerate(random_prompts(engine.spec, batch, context - RESPONSE // 2, seed=batch)):
        engine.add(sample, prompt, params)
    seconds, contexts = [], []
    while engine.has_unfinished():
        engine.step()
        stats = engine.last_step
        if stats.prefill_tokens == 0 and stats.batch == batch:
            seconds.append(stats.seconds)
            contexts.append(stats.context_tokens)
    # The first steps load kernels.
    return statistics.median(seconds[4:]), contexts[len(contexts) // 2]


def prefill_seconds(engine: Engine, prompts: int, length: int) -> float:
    """Shortest of three steps that run `prompts` whole prompts; a first one is not counted."""
    seconds = []
    for seed in range(4):
        for sample, prompt in enumerate(random_prompts(engine.spec, prompts, length, 1000 + seed)):
            engine.add(sample, prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        engine.step()
        engine.settle()
        assert not engine.has_unfinished(), "the prompts were to fit into one step"
        seconds.append(engine.last_step.seconds)
    return min(seconds[1:])


def check_decode(
    bench: Bench,
    size: str,
    points: Points = SHORT,
    block_tokens: int = 16,
    library: Attention | None = None,
    graphs: bool = True,
) -> dict:
    """Decode steps and prefill of one shape, on the CPU of the tiny one, with CUDA graphs or without."""
    size, points = (size, points) if bench.on_gpu else ("tiny", ON_CPU)
    spec, device = spec_of(size), bench.where
    needed, blocks = needed_bytes(spec, points, block_tokens)
    if bench.on_gpu and (free := torch.cuda.mem_get_info(device)[0]) < needed:
        return {"skipped": f"{needed >> 20} MiB of device memory are needed, {free >> 20} MiB are free"}
    if library and (reason := flashinfer_obstacle(_shape(spec, bench, block_tokens))):
        return {"skipped": reason}
    options = EngineOptions(
        blocks,
        block_tokens,
        max_sequences=max(PROMPTS, *(batch for batch, _ in points)),
        max_batched_tokens=STEP_TOKENS,
        kernels="torch",
        attention=library or bench.attention,
        cuda_graphs=graphs,
    )
    engine = Engine(spec, random_weights(spec, device, torch.bfloat16), options, device=device, dtype=torch.bfloat16)
    figures = []
    kind = f"{size} {library}" if library else size
    kind += f" blocks of {block_tokens}" if block_tokens != 16 else ""
    kind += "" if graphs or not bench.on_gpu else " eager"
    for batch, context in points:
        seconds, tokens = decode_seconds(engine, batch, context)
        price = ("decode", size, batch, tokens)
        figures.append(Figure(f"decode {kind} {batch} x {context}", seconds, price, bytes=step_bytes(spec, tokens)))
    prompts, length = (PROMPTS, PROMPT) if bench.on_gpu else (2, 100)
    flops = forward_flops(spec, [length] * prompts, prompts)
    prefill = prefill_seconds(engine, prompts, length)
    figures.append(Figure(f"prefill {kind}", prefill, ("prefill", size, prompts, length), flops=flops))
    shortest = prefill_seconds(engine, *SHORTEST)
    figures.append(Figure(f"prefill {kind} {SHORTEST[0]} x {SHORTEST[1]}", shortest, ("prefill", size, *SHORTEST)))
    if shapes := engine.forward.recorded_shapes:  # again: kernels are compiled and loaded the first time
        recorded = engine.forward.recording_seconds
        engine.pause()
        engine.resume()
        decode_seconds(engine, *points[1])
        each = (engine.forward.recording_seconds - recorded) / (engine.forward.recorded_shapes - shapes)
        figures.append(Figure(f"capture {kind}", each, ("capture", size)))
    return told(*figures, lines=[engine.lines[0]])


def needed_bytes(spec: ModelSpec, points: Points, block_tokens: int) -> tuple[int, int]:
    """Device memory for the largest point: weights, cache, logits and the sampler's copies, 2 GiB spare; blocks."""
    longest = [(batch, context + response_tokens(batch, context)) for batch, context in (*points, (PROMPTS, PROMPT))]
    blocks = max(batch * -(-tokens // block_tokens) for batch, tokens in longest) + PROMPTS
    sampling = 64 * max(batch for batch, _ in points) * spec.vocab
    cache = blocks * block_tokens * spec.kv_bytes_per_token(ELEMENT)
    return spec.parameters() * ELEMENT + cache + sampling + (2 << 30), blocks


def _shape(spec: ModelSpec, bench: Bench, block_tokens: int, rows: int = 256) -> CacheShape:
    return CacheShape(torch.bfloat16, bench.where, spec.heads, spec.kv_heads, spec.head_dim, block_tokens, rows)


def check_attention(bench: Bench, name: str) -> dict:
    """Decode attention of one layer of 8B alone: keys and values over its seconds."""
    name, points = (name, ((192, 1000), (16, 8192))) if bench.on_gpu else ("torch", ((2, 64),))
    spec, block = spec_of("8b" if bench.on_gpu else "tiny"), 16
    if name == "flashinfer" and (reason := flashinfer_obstacle(_shape(spec, bench, block))):
        return {"skipped": reason}
    figures, repeats = [], 8
    for rows, context in points:
        width = -(-context // block)
        tables = torch.randperm(rows * width, generator=torch.Generator().manual_seed(1)).view(rows, width).int()
        sizes = torch.full((rows,), context, dtype=torch.int32, device=bench.where)
        cache = (rows * width, block, spec.kv_heads, spec.head_dim)
        keys, values = (torch.randn(cache, device=bench.where, dtype=torch.bfloat16) for _ in range(2))
        q = torch.randn(rows, spec.heads, spec.head_dim, device=bench.where, dtype=torch.bfloat16)
        attend = choose_paged(_shape(spec, bench, block, rows), name).kernels.decode(tables.to(bench.where), sizes)
        found = timed(bench, lambda: [attend(q, keys, values) for _ in range(repeats)], count=repeats)  # noqa: B023
        moved = rows * context * spec.kv_bytes_per_token(ELEMENT) / spec.layers
        seconds = found.device_seconds or found.seconds
        figures.append(Figure(f"attention {name} {rows} x {context}", seconds, ("read", moved), bytes=moved))
    return told(*figures)
