"""How near generation comes to the limits of a GPU; run by tools/gpu_check.py, which prints what is returned here.

    decode     bytes that a step must read (weights once, all keys and values) / its seconds / memory bandwidth
    prefill    operations of a step (matrix products and attention) / its seconds / GEMM rate
Limits are measured on the same device in the same call, by a large copy and a large product; seconds are the engine's.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_checks.bench import TINY, Bench

from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.core.forward_batch import RunningTable
from rlhfuse.gen.core.sequence import Sequence
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.gen.speculation.drafter import Drafter

LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    hidden_act="silu",
    bos_token_id=1,
    eos_token_id=2,
    torch_dtype="bfloat16",
)
SHAPES = {
    "1b": dict(
        LLAMA,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        head_dim=64,
        intermediate_size=8192,
        tie_word_embeddings=True,
    ),
    "8b": dict(
        LLAMA,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        head_dim=128,
        intermediate_size=14336,
        tie_word_embeddings=False,
    ),
}
# Memory bandwidth in the makers' data sheets, bytes/s, by a part of the device's name; the first match counts.
DATA_SHEET = (
    ("B200", 8.0e12),
    ("H200", 4.8e12),
    ("H100 PCIe", 2.0e12),
    ("H100 NVL", 3.9e12),
    ("H100", 3.35e12),
    ("H800 PCIe", 2.0e12),
    ("H800", 3.35e12),
    ("A100-SXM4-80GB", 2.039e12),
    ("A100 80GB PCIe", 1.935e12),
    ("A100", 1.555e12),
    ("A800", 2.039e12),
    ("L40S", 0.864e12),
    ("A10", 0.6e12),
    ("RTX 4090", 1.008e12),
)
ELEMENT = 2  # bytes of a bfloat16
PROMPT, RESPONSE = 128, 32  # tokens of a sample in the decode measurement
BATCHES = (1, 16, 64, 256)
VERIFIED, GUESSES, VERIFY_GOAL = 4, 3, 1.2  # sequences, guesses of each; decode steps that such a step may cost
LONG = {2048: (1, 16, 64), 8192: (1, 16)}  # context -> batches


def random_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights of one whole model under Megatron-core names, made on the device."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=dtype) * columns**-0.5

    ones = torch.ones(spec.hidden, device=device, dtype=dtype)
    qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    weights = {"embedding.word_embeddings.weight": draw(spec.vocab, spec.hidden)}
    weights["decoder.final_layernorm.weight"] = ones
    for number in range(spec.layers):
        prefix = f"decoder.layers.{number}."
        weights |= {
            f"{prefix}input_layernorm.weight": ones,
            f"{prefix}pre_mlp_layernorm.weight": ones,
            f"{prefix}self_attention.linear_qkv.weight": draw(qkv, spec.hidden),
            f"{prefix}self_attention.linear_proj.weight": draw(spec.hidden, spec.heads * spec.head_dim),
            f"{prefix}mlp.linear_fc1.weight": draw(2 * spec.mlp, spec.hidden),
            f"{prefix}mlp.linear_fc2.weight": draw(spec.hidden, spec.mlp),
        }
    if not spec.tied_embeddings:
        weights["output_layer.weight"] = draw(spec.vocab, spec.hidden)
    return weights


# the limits ---------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Shortest of several runs, each until the device has finished it; a first one is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy: what the memory can do, on this machine."""
    size = 1 << (30 if device.type == "cuda" else 26)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / best_seconds(lambda: target.copy_(source), device)


def gemm_rate(device: torch.device) -> float:
    """Operations per second of a large square matrix product in bfloat16; a multiply-add is two."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: a @ b, device)


def data_sheet_bandwidth(device: torch.device) -> float | None:
    """Bytes per second that the maker states; None for a device not in the list."""
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""
    return next((rate for part, rate in DATA_SHEET if part in name), None)


# the measurements ---------------------------------------------------------------------------------------------


def needed_bytes(spec: ModelSpec, batch: int) -> int:
    """Device memory for the largest batch: weights, keys and values, logits and the sampler's copies, 2 GiB spare."""
    longest = PROMPT + RESPONSE + 256  # a block of 256 tokens is filled in part
    sampling = 64 * batch * spec.vocab
    return spec.parameters() * ELEMENT + batch * longest * spec.kv_bytes_per_token(ELEMENT) + sampling + (2 << 30)


def step_bytes(spec: ModelSpec, context_tokens: int) -> int:
    """Bytes that a decode step must read: all weights but an embedding of its own, and all keys and values."""
    lookup = 0 if spec.tied_embeddings else spec.embedding_parameters
    return (spec.parameters() - lookup) * ELEMENT + context_tokens * spec.kv_bytes_per_token(ELEMENT)


def prefill_operations(spec: ModelSpec, prompts: int, length: int) -> int:
    """Multiplications and additions for whole prompts; the output layer works on the last token of each."""
    products = 2 * spec.layers * spec.layer_parameters * prompts * length + 2 * spec.embedding_parameters * prompts
    attention = 4 * spec.layers * spec.heads * spec.head_dim * prompts * (length * (length + 1) // 2)
    return products + attention


def random_prompts(spec: ModelSpec, count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts that share no prefix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, spec.vocab, (count, length), generator=generator).tolist()


class RandomGuesses(Drafter):
    """A few tokens at random for each sample, of which hardly one is right: what it costs to verify them."""

    def __init__(self, vocab: int, draft_rows: int, each: int) -> None:
        super().__init__(vocab, draft_rows, lambda sequences, guesses: 1.0)
        self._random, self._vocab, self._each = random.Random(0), vocab, each

    def propose(self, sequences: list[Sequence], table: RunningTable, rows: int, each: int) -> list[list[int]]:
        most = [min(self._each, seq.max_total_tokens - seq.total_tokens - 1) for seq in sequences]
        return [[self._random.randrange(self._vocab) for _ in range(max(count, 0))] for count in most]

    def told(self, number: int, tried: int, right: int) -> None:
        pass


def verifying(engine: Engine, plain_seconds: float) -> dict[str, float]:
    """A step that verifies three guesses of each of four sequences, beside their plain decode step.

    Where it costs at most VERIFY_GOAL steps, rollout.draft_rows=64 is worth its rows on this machine.
    """
    rows = engine.runner.draft_rows
    engine.drafter = RandomGuesses(engine.spec.vocab, rows, GUESSES)
    seconds, _ = decode_seconds(engine, VERIFIED)
    engine.drafter = None
    return {"step_seconds": seconds, "over_decode_step": round(seconds / plain_seconds, 3), "goal": VERIFY_GOAL}


def decode_seconds(engine: Engine, batch: int, prompt_tokens: int = PROMPT) -> tuple[float, int]:
    """Median seconds of a decode step of all `batch` sequences, and the tokens in the cache at such a step."""
    params = SamplingParams(max_tokens=RESPONSE, ignore_eos=True)
    for sample, prompt in enumerate(random_prompts(engine.spec, batch, prompt_tokens, seed=batch)):
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


def captured(engine: Engine) -> dict[str, float]:
    """CUDA graphs, kernels compiled meanwhile included."""
    return {"capture_seconds": engine.runner.recording_seconds, "captured_shapes": engine.runner.recorded_shapes}


def spec_of(shape: dict, folder: Path) -> ModelSpec:
    """The shape as the program reads it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return ModelSpec.from_config(folder)


def check_decode(bench: Bench, size: str, block_tokens: int) -> dict:
    """`measure` of a shape of SHAPES, or on the CPU of the tiny one."""
    shape, batches = (SHAPES[size], BATCHES) if bench.on_gpu else (TINY, (1, 4))
    return measure(shape, bench.folder / size, bench.where, block_tokens, batches)


def check_long_contexts(bench: Bench, size: str) -> dict:
    """Decode steps of sequences of 2k and 8k tokens, beside the bandwidth of a copy."""
    shape, contexts = (SHAPES[size], LONG) if bench.on_gpu else (TINY, {64: (1, 2)})
    spec, block = spec_of({**shape, "max_position_embeddings": 16384}, bench.folder / size), 16
    most = max(max(batches) * (context + RESPONSE + block) for context, batches in contexts.items())
    needed = spec.parameters() * ELEMENT + most * spec.kv_bytes_per_token(ELEMENT) + (6 << 30)
    if bench.on_gpu and (free := torch.cuda.mem_get_info(bench.where)[0]) < needed:
        return {"skipped": f"{needed >> 20} MiB of device memory are needed, {free >> 20} MiB are free"}
    bandwidth, rows = copy_bandwidth(bench.where), {}
    options = EngineOptions(-(-most // block), block, max_sequences=64, max_batched_tokens=8192, kernels="torch")
    weights = random_weights(spec, bench.where, torch.bfloat16)
    engine = Engine(spec, weights, options, device=bench.where, dtype=torch.bfloat16)
    for context, batches in contexts.items():
        for batch in batches:
            seconds, tokens = decode_seconds(engine, batch, context)
            share = step_bytes(spec, tokens) / seconds / bandwidth
            rows[f"{context}_{batch}"] = {"step_seconds": seconds, "copy_bandwidth_fraction": round(share, 4)}
    return {"copy_bytes_per_second": bandwidth, "decode": rows, **captured(engine)}


def measure(shape: dict, folder: Path, device: torch.device, block_tokens: int, batches: tuple[int, ...]) -> dict:
    """Decode and prefill of one shape, as fractions of the limits, with CUDA graphs and without."""
    spec, longest = spec_of(shape, folder), PROMPT + RESPONSE
    if device.type == "cuda":
        needed, free = needed_bytes(spec, max(batches)), torch.cuda.mem_get_info(device)[0]
        if free < needed:
            return {"skipped": f"{needed >> 20} MiB of device memory are needed, {free >> 20} MiB are free"}
    bandwidth, sheet, rate = copy_bandwidth(device), data_sheet_bandwidth(device), gemm_rate(device)
    weights = random_weights(spec, device, torch.bfloat16)
    length = min(512, spec.context // 2)
    prompts = 16 if device.type == "cuda" else 2
    result: dict = {
        "parameters": spec.parameters(),
        "block_tokens": block_tokens,
        "copy_bytes_per_second": bandwidth,
        "data_sheet_bytes_per_second": sheet,
        "gemm_operations_per_second": rate,
    }
    for name, graphs in (("graphs", True), ("eager", False)):
        if graphs and device.type != "cuda":
            continue
        most = max(*batches, VERIFIED)
        blocks = max(most * -(-longest // block_tokens), prompts * -(-length // block_tokens))
        options = EngineOptions(
            num_blocks=blocks,
            block_tokens=block_tokens,
            max_sequences=max(most, prompts),
            kernels="torch",
            max_batched_tokens=prompts * length,
            cuda_graphs=graphs,
            draft_rows=VERIFIED * (1 + GUESSES),
        )
        engine = Engine(spec, weights, options, device=device, dtype=torch.bfloat16)
        engine.drafter, rows = None, {}
        for batch in batches:
            seconds, context = decode_seconds(engine, batch)
            needed = step_bytes(spec, context) / seconds
            rows[str(batch)] = {
                "tokens_per_second": round(batch / seconds, 1),
                "step_seconds": seconds,
                "copy_bandwidth_fraction": round(needed / bandwidth, 4),
                "data_sheet_fraction": None if sheet is None else round(needed / sheet, 4),
            }
        seconds = prefill_seconds(engine, prompts, length)
        result["attention"] = engine.runner.lines[0]
        plain = rows.get(str(VERIFIED)) or {"step_seconds": decode_seconds(engine, VERIFIED)[0]}
        result[name] = {
            "verify": verifying(engine, plain["step_seconds"]),
            "decode": rows,
            **captured(engine),
            "prefill_tokens_per_second": round(prompts * length / seconds, 1),
            "prefill_gemm_fraction": round(prefill_operations(spec, prompts, length) / seconds / rate, 4),
        }
        engine.pause()  # gives back the graphs' memory before the next engine takes its own
        del engine
    return result
