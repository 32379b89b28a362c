"""What training costs on the device: a stage's layers, output layer and loss, the optimizer, weights to and fro."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from gpu_checks.bench import Bench
from gpu_checks.figures import Figure, timed, told
from gpu_checks.result import require
from gpu_checks.speed import ELEMENT
from gpu_checks.stage_bench import STAGES, MiddleStage, stage_size

from rlhfuse.costs.flops import forward_flops
from rlhfuse.costs.kernels import Kernels
from rlhfuse.parallel.offload import OffloadedWeights

LAYERS = 4  # of the stage
ROW = 3  # forwards and backwards, one after the other: the host runs ahead, if it can


def check_stage(bench: Bench, tokens: int, sequence: int) -> dict:
    """Forward, forward with backward, and three of these in a row, of 4 layers on `tokens` tokens in sequences of so
    many: until the device has finished, the device alone, the host alone.

    A forward reads the weights, a backward once more, and reads and writes their float32 gradients.
    """
    tokens, sequence = (tokens, sequence) if bench.on_gpu else (64, 32)
    lengths = [sequence] * (tokens // sequence)
    with bench.one_rank():
        stage = MiddleStage(stage_size(bench), LAYERS if bench.on_gpu else 1, bench)
        layers, spec, size = stage.spec.layers // STAGES, stage.spec, stage_size(bench)
        batch, flops = stage.batch(lengths), forward_flops(replace(spec, layers=layers), lengths, 0)
        forward = timed(bench, lambda: stage.forward(batch))
        both = timed(bench, lambda: stage.backward(stage.forward(batch)))
        row = timed(bench, lambda: [stage.backward(stage.forward(batch)) for _ in range(ROW)], count=ROW)
    weights, micro = layers * spec.layer_parameters, (size, layers, tokens, len(lengths))
    read, summed = weights * ELEMENT, weights * (2 * ELEMENT + Kernels().gradient_sum_bytes)
    return told(
        Figure(f"stage {tokens} forward", forward[0], ("forward", *micro), read, flops, "memory", *forward[1:]),
        Figure(f"stage {tokens}", both[0], ("training", *micro), summed, 3 * flops, "memory", *both[1:]),
        Figure(f"stage {tokens} in a row", row[0], ("in a row", *micro), summed, 3 * flops, "memory", *row[1:]),
        Figure(f"launches {tokens}", forward.host_seconds, ("launches", layers)),
        Figure(f"backward launches {tokens}", both.host_seconds - forward.host_seconds, ("backward launches", layers)),
    )


def check_head(bench: Bench, tokens: int) -> dict:
    """Output layer, log-probability and their backward: a last stage of one layer, less a middle one."""
    tokens, seconds, peaks, flops = tokens if bench.on_gpu else 32, {}, {}, 0.0
    with bench.one_rank():
        for last in (False, True):
            stage = MiddleStage(stage_size(bench), 1, bench, last)
            batch = stage.batch([tokens])
            seconds[last] = timed(bench, lambda: stage.train(batch)).seconds  # noqa: B023
            if bench.on_gpu:
                held = torch.cuda.memory_allocated(bench.where)
                torch.cuda.reset_peak_memory_stats(bench.where)
                stage.train(batch)
                peaks[last] = torch.cuda.max_memory_allocated(bench.where) - held
            flops = 6.0 * tokens * stage.spec.vocab * stage.spec.hidden
    figure = Figure(f"head {tokens}", seconds[True] - seconds[False], ("head", stage_size(bench), tokens), flops=flops)
    return told(figure, peak_bytes_of_one_layer=peaks.get(False), peak_bytes_with_head=peaks.get(True))


def check_optimizer(bench: Bench) -> dict:
    """Gradients set to zero and one step of 4 layers of 8B on one rank, which holds all of the optimizer."""
    layers = LAYERS if bench.on_gpu else 1
    with bench.one_rank():
        stage = MiddleStage(stage_size(bench), layers, bench)
        stage.train(stage.batch([32]))
        stage.optimizer.finish_gradients()

        def step() -> None:
            stage.optimizer.step(1e-5)
            stage.optimizer.zero_grad()

        seconds = timed(bench, step, 3).seconds
        count = sum(parameter.numel() for parameter in stage.model.parameters())
    moved = count * (Kernels().adam_bytes + Kernels().zero_bytes)
    return told(Figure("optimizer", seconds, ("optimizer", stage_size(bench), layers), bytes=moved), parameters=count)


def check_weights(bench: Bench) -> dict:
    """Weights to the host and back with the same bits, their memory given back.

    Beside it products on another stream, and the same alone.
    """
    width, count = (4096, 32) if bench.on_gpu else (64, 2)
    layers = (torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(count))
    module = torch.nn.Sequential(*layers).to(bench.where)
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    a, b = (torch.randn(width, width, device=bench.where).bfloat16() for _ in range(2))
    side = torch.cuda.Stream() if bench.on_gpu else None
    wanted = [parameter.detach().cpu().clone() for parameter in module.parameters()]

    def allocated() -> int:
        return torch.cuda.memory_allocated(bench.where) if bench.on_gpu else 0

    offloaded, before = OffloadedWeights(module, bench.device), allocated()
    start = time.perf_counter()
    offloaded.offload()
    bench.synchronize()
    offload, freed = time.perf_counter() - start, before - allocated()

    def load() -> None:
        offloaded.load()
        bench.synchronize()
        offloaded.release()

    def products() -> None:
        with torch.cuda.stream(side):  # without one it changes nothing
            for _ in range(60):
                torch.mm(a, b)

    loading, alone = timed(bench, load, 3).seconds, timed(bench, products).seconds
    together = timed(bench, lambda: (products(), load()), 3).seconds
    offloaded.load()
    bench.synchronize()
    same = all(torch.equal(parameter.cpu(), one) for parameter, one in zip(module.parameters(), wanted))
    require(same and (freed >= size or not bench.on_gpu), {"same_bits": same, "freed_bytes": freed, "bytes": size})
    return told(
        Figure("weights to the host", offload, ("load", size), bytes=size, over="host"),
        Figure("weights to the device", loading, ("load", size), bytes=size, over="host"),
        products_seconds=alone,
        load_and_products_seconds=together,
    )
