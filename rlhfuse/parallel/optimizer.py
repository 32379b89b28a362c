"""Megatron-core's DistributedDataParallel and DistributedOptimizer (ZeRO-1) for one model's stage.

Gradients accumulate in Megatron's buffers and are summed over data-parallel ranks (losses are already
divided by the mini-batch's token count). Adam in float32 main weights; clipping by the norm over all ranks of
the model. The context of device.py is open only around construction and the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfuse.config import OptimizerConfig
from rlhfuse.parallel.device import Device, cpu_stands_in
from rlhfuse.parallel.partial_gradients import sum_partial_gradients


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. `grad_norm` is before clipping."""

    grad_norm: float
    finite: bool
    lr: float


class ModelOptimizer:
    """Owns the gradient buffers and the optimizer of one model on this rank; `module` is what computes."""

    def __init__(
        self, model: torch.nn.Module, config: OptimizerConfig, groups: ProcessGroupCollection, device: Device
    ) -> None:
        self._config = config
        self._groups = groups
        self._device = device
        bf16 = next(model.parameters()).dtype == torch.bfloat16
        with cpu_stands_in(device):
            self.module = DistributedDataParallel(
                config=model.config,
                ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
                module=model,
                pg_collection=groups,
            )
            self.optimizer = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=config.lr,
                    min_lr=0.0,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.beta1,
                    adam_beta2=config.beta2,
                    adam_eps=config.eps,
                    clip_grad=config.clip_grad,
                    bf16=bf16,
                    params_dtype=torch.bfloat16 if bf16 else torch.float32,
                    use_distributed_optimizer=True,
                ),
                [self.module],
                use_gloo_process_groups=False,
                pg_collection=groups,
            )

    def zero_grad(self) -> None:
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reload_main_weights(self) -> None:
        """Take over weights that were written into the module after construction."""
        self.optimizer.reload_model_params()

    def finish_gradients(self) -> None:
        """Sum gradients of tied embeddings over first and last stage, then over data-parallel ranks."""
        core = self.module.module
        sum_partial_gradients(core, self._groups.tp)
        if core.share_embeddings_and_output_weights and self._groups.embd is not None:
            weight = core.shared_embedding_or_output_weight()
            dist.all_reduce(weight.main_grad, group=self._groups.embd)
        self.module.finish_grad_sync()  # without overlap this starts the reduction too

    def step(self, lr: float) -> StepResult:
        """One optimizer step at learning rate `lr`; skipped by Megatron when a gradient is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with cpu_stands_in(self._device):
            succeeded, norm, _ = self.optimizer.step()
        return StepResult(float(norm or 0.0), bool(succeeded), lr)
