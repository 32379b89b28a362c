"""One rank's training on the device against the CPU: loss, gradients, step, numbers not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import torch
from gpu_checks.bench import DTYPES, Bench
from gpu_checks.result import TOLERANCE, relative, require

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import OptimizerConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import Recompute
from rlhfuse.models.build import Activations, build_model, fill
from rlhfuse.models.heads import LanguageOutput
from rlhfuse.models.hf import load_weights
from rlhfuse.models.stage import PackedTokens, PipelineStage, TrainingStage
from rlhfuse.parallel.device import Device, choose_device
from rlhfuse.parallel.groups import GroupMaker, plain_grid
from rlhfuse.parallel.optimizer import ModelOptimizer

LR = 1e-3


class OneRank:
    """A whole model with its optimizer on one rank; needs a process group."""

    def __init__(self, model: Path, where: Device, dtype: torch.dtype, recompute: Recompute = "none") -> None:
        self.spec = ModelSpec.from_config(model)
        grid = plain_grid(ParallelLayout(1, 1, 1))
        self.groups = GroupMaker(60.0).for_model("check", grid, 0)
        kind: dict[str, Any] = {"scalar_head": False, "dtype": dtype}
        kind["activations"] = Activations(recompute=recompute)
        self.model = build_model(self.spec, grid, self.groups, 0, device=where, **kind)
        fill(self.model, load_weights(model, self.spec))
        self.optimizer = ModelOptimizer({0: self.model}, OptimizerConfig(lr=LR), self.groups, where)
        part = PipelineStage(self.optimizer.module, first=True, last=True, scalar_head=False)
        self.stage, self.where = TrainingStage(part), where
        self.optimizer.zero_grad()

    def forward_backward(self, microbatch: int = 0) -> float:
        """One packed micro-batch; its loss."""
        generator = torch.Generator().manual_seed(4)
        rows = [torch.randint(3, self.spec.vocab, (n,), generator=generator).tolist() for n in (9, 30, 17)]
        packed = PackedTokens.pack(rows, self.where.torch_device)
        targets, losses = packed.tokens.roll(-1)[: sum(map(len, rows))], []

        def loss(output: LanguageOutput, _: int) -> torch.Tensor:
            mean = lambda logprobs, entropy, rows: -logprobs.sum() / len(targets)  # noqa: E731
            losses.append(output.loss(mean, slice(len(targets)), targets, self.spec.vocab, 1.0))
            return losses[-1]

        self.stage.forward(microbatch, packed, None, loss)
        self.stage.backward(microbatch, None)
        return float(losses[0].detach())

    def gradients(self) -> dict[str, torch.Tensor]:
        named: list[tuple[str, Any]] = list(self.model.named_parameters())
        return {name: parameter.main_grad.float().cpu().clone() for name, parameter in named}


def train_once(model: Path, where: Device, dtype: torch.dtype, recompute: Recompute = "none") -> dict[str, Any]:
    """Loss, gradient norm and gradients of one step."""
    rank = OneRank(model, where, dtype, recompute)
    loss, gradients = rank.forward_backward(), rank.gradients()
    rank.optimizer.finish_gradients()
    return {"loss": loss, "norm": rank.optimizer.step(LR).grad_norm, "gradients": gradients}


def training_reference(bench: Bench, model: Path, dtype: str) -> dict[str, Any]:
    """The same on the CPU, or from its file."""
    cpu = choose_device("cpu", 0, 1)
    return bench.references.get(f"training_{dtype}", lambda: train_once(model, cpu, DTYPES[dtype]))


def apart(found: dict[str, Any], wanted: dict[str, Any], dtype: torch.dtype) -> tuple[bool, str, float]:
    """Whether loss and gradients of two `train_once` are close; the worst gradient, and how far it is off."""
    bound = TOLERANCE[dtype]
    errors = {name: relative(found["gradients"][name], gradient) for name, gradient in wanted["gradients"].items()}
    worst = max(errors, key=lambda name: errors[name])
    close = abs(found["loss"] - wanted["loss"]) < bound * abs(wanted["loss"])
    return close and errors[worst] < 10 * bound, worst, errors[worst]


def check_training(bench: Bench, dtype: str) -> dict:
    """Loss, gradient norm and every gradient of one step, on the device against the CPU."""
    model, bound = bench.tiny(), TOLERANCE[DTYPES[dtype]]
    with bench.one_rank():
        here = training_reference(bench, model, dtype)
        there = train_once(model, bench.device, DTYPES[dtype])
    close, worst, error = apart(there, here, DTYPES[dtype])
    detail = {
        "loss": there["loss"],
        "loss_on_cpu": here["loss"],
        "grad_norm": there["norm"],
        "grad_norm_on_cpu": here["norm"],
        "worst_gradient": worst,
        "relative_error": error,
    }
    return require(close and abs(there["norm"] - here["norm"]) < 2 * bound * here["norm"], detail)


def check_split_backward(bench: Bench, dtype: str) -> dict:
    """Two micro-batches whose weight gradients follow both backwards, against whole backwards on the same device."""
    with bench.one_rank():
        rank, found = OneRank(bench.tiny(), bench.device, DTYPES[dtype]), {}
        for split in (False, True):
            rank.optimizer.zero_grad()
            rank.stage.split_backward(split)
            for microbatch in (0, 1):
                rank.forward_backward(microbatch)
            before = rank.gradients()
            for microbatch in (0, 1) if split else ():
                rank.stage.backward_weight(microbatch)
            found[split] = rank.gradients()
    put_off = sum(not torch.equal(before[name], gradient) for name, gradient in found[True].items())
    error = max(relative(found[True][name], wanted) for name, wanted in found[False].items())
    # four linear layers in each of the tiny model's four layers
    return require(error < TOLERANCE[DTYPES[dtype]] and put_off == 16, {"gradients": error, "put_off": put_off})


def check_recomputed(bench: Bench, dtype: str) -> dict:
    """What is run again in backwards has the same bits."""
    model, modes = bench.tiny(), get_args(Recompute)
    with bench.one_rank():
        found = {how: train_once(model, bench.device, DTYPES[dtype], recompute=how)["gradients"] for how in modes}
    wanted = found.pop("none")
    different = {
        how: sum(not torch.equal(gradient, wanted[name]) for name, gradient in gradients.items())
        for how, gradients in found.items()
    }
    return require(not any(different.values()), {"different": different})


def check_refused_step(bench: Bench) -> dict:
    """A NaN or an infinity in one gradient: the step says so and changes no weight, and the next one steps."""
    with bench.one_rank():
        rank = OneRank(bench.tiny(), bench.device, torch.bfloat16)
        found = {}
        for name, value in (("nan", math.nan), ("infinity", math.inf), ("finite", None)):
            rank.optimizer.zero_grad()
            rank.forward_backward()
            before = [p.detach().clone() for p in rank.model.parameters()]
            if value is not None:
                parameter: Any = next(rank.model.parameters())
                parameter.main_grad.view(-1)[3] = value
            rank.optimizer.finish_gradients()
            result = rank.optimizer.step(LR)
            changed = sum(not torch.equal(a, b) for a, b in zip(before, rank.model.parameters()))
            found[name] = {"finite": result.finite, "changed_weights": changed}
    good = all(not found[name]["finite"] and not found[name]["changed_weights"] for name in ("nan", "infinity"))
    return require(good and found["finite"]["finite"] and found["finite"]["changed_weights"] > 0, found)
