"""What training costs on the device, each figure beside the limit that it is measured against.

stage       forward and backward of 4 layers of 8B, as a share of a large product's rate and of the data sheet's
head        the last stage's output layer and loss: seconds and memory beyond its inputs
optimizer   gradient norm, update and gathering, beside the bytes that an update moves
weights     to the host and back, alone and beside products on another stream
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_checks.bench import Bench
from gpu_checks.speed import best_seconds, copy_bandwidth, gemm_rate
from gpu_checks.stage_bench import STAGES, MiddleStage, stage_shape

from rlhfuse.config.spec import ModelSpec
from rlhfuse.parallel.offload import OffloadedWeights

DATA_SHEET_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12}
LAYERS, SEQUENCE = 4, 2048


def layer_operations(spec: ModelSpec, layers: int, lengths: list[int]) -> float:
    """Multiplications and additions of a forward: matrix products, and causal attention's own half of the square."""
    products = 2.0 * layers * spec.layer_parameters * sum(lengths)
    return products + 2.0 * layers * spec.heads * spec.head_dim * sum(length * (length + 1) for length in lengths)


def timed(bench: Bench, work: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds until the device has finished, after two that do not count."""
    seconds = []
    for _ in range(repeats + 2):
        bench.synchronize()
        start = time.perf_counter()
        work()
        bench.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def check_stage(bench: Bench, tokens: int) -> dict:
    """Forward and backward of 4 layers on `tokens` tokens in sequences of 2048."""
    tokens, sequence = (tokens, SEQUENCE) if bench.on_gpu else (64, 32)
    lengths = [sequence] * (tokens // sequence)
    with bench.one_rank():
        stage = MiddleStage(stage_shape(bench), LAYERS if bench.on_gpu else 1, bench)
        layers = stage.spec.layers // STAGES
        batch, operations = stage.batch(lengths), layer_operations(stage.spec, layers, lengths)
        forward = timed(bench, lambda: stage.forward(batch))
        both = timed(bench, lambda: stage.backward(stage.forward(batch)))
    rate, name = gemm_rate(bench.where), torch.cuda.get_device_name() if bench.on_gpu else ""
    sheet = next((value for part, value in DATA_SHEET_FLOPS.items() if part in name), None)
    return {
        "tokens": tokens,
        "layers": layers,
        "forward_seconds": forward,
        "backward_seconds": both - forward,
        "gemm_operations_per_second": rate,
        "forward_gemm_fraction": round(operations / forward / rate, 4),
        "gemm_fraction": round(3 * operations / both / rate, 4),
        "mfu": None if sheet is None else round(3 * operations / both / sheet, 4),
    }


def check_head(bench: Bench, tokens: int) -> dict:
    """Output layer, log-probability and their backward: a last stage of one layer, less a middle one."""
    tokens = tokens if bench.on_gpu else 32
    seconds, peaks, products = {}, {}, 0.0
    with bench.one_rank():
        for last in (False, True):
            stage = MiddleStage(stage_shape(bench), 1, bench, last)
            batch = stage.batch([tokens])
            seconds[last] = timed(bench, lambda: stage.train(batch))  # noqa: B023
            if bench.on_gpu:
                held = torch.cuda.memory_allocated(bench.where)
                torch.cuda.reset_peak_memory_stats(bench.where)
                stage.train(batch)
                peaks[last] = torch.cuda.max_memory_allocated(bench.where) - held
            products = 6.0 * tokens * stage.spec.vocab * stage.spec.hidden
    return {
        "tokens": tokens,
        "seconds": seconds[True] - seconds[False],
        "seconds_of_its_products": products / gemm_rate(bench.where),
        "peak_bytes_of_one_layer": peaks.get(False),
        "peak_bytes_with_head": peaks.get(True),
    }


def check_optimizer(bench: Bench) -> dict:
    """One step of 4 layers of 8B on one rank, which holds all of the optimizer."""
    with bench.one_rank():
        stage = MiddleStage(stage_shape(bench), LAYERS if bench.on_gpu else 1, bench)
        stage.train(stage.batch([32]))
        stage.optimizer.finish_gradients()
        seconds = timed(bench, lambda: stage.optimizer.step(1e-5), 3)
        count = sum(parameter.numel() for parameter in stage.model.parameters())
    # gradient twice (norm, update), main weight and two moments read and written, weight written
    moved = count * (4 + 4 + 2 * 3 * 4 + 2)
    share = moved / seconds / copy_bandwidth(bench.where)
    return {"parameters": count, "seconds": seconds, "copy_bandwidth_fraction": round(share, 4)}


def check_weights(bench: Bench) -> dict:
    """Weights to the host and back, alone and while products run, and what the products lose by it."""
    width, count = (4096, 32) if bench.on_gpu else (64, 2)
    layers = (torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(count))
    module = torch.nn.Sequential(*layers).to(bench.where)
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    a, b = (torch.randn(width, width, device=bench.where).bfloat16() for _ in range(2))

    def products() -> None:
        for _ in range(60):
            torch.mm(a, b)

    def compute() -> None:
        products()
        if bench.on_gpu:  # the stream's own work, not the copies of another
            torch.cuda.current_stream().synchronize()

    def load_apart() -> None:
        if bench.on_gpu:
            with torch.cuda.stream(torch.cuda.Stream()):
                offloaded.load()
        else:
            offloaded.load()

    offloaded = OffloadedWeights(module, bench.device)
    start = time.perf_counter()
    offloaded.offload()
    bench.synchronize()
    offload, loading = time.perf_counter() - start, []
    for _ in range(4):
        start = time.perf_counter()
        offloaded.load()
        bench.synchronize()
        loading.append(time.perf_counter() - start)
        offloaded.release()
    alone = best_seconds(compute, bench.where)
    thread = threading.Thread(target=load_apart)
    bench.synchronize()
    start = time.perf_counter()
    thread.start()
    compute()
    computed = time.perf_counter() - start
    thread.join()
    return {
        "bytes": size,
        "first_offload_bytes_per_second": size / offload,
        "load_bytes_per_second": size / min(loading),
        "load_and_products_seconds": time.perf_counter() - start,
        "products_seconds": alone,
        "products_seconds_beside_a_load": computed,
    }
