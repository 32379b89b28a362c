"""Megatron-core's DistributedDataParallel and optimizer for one model's stages on this rank.

Gradients are summed over data-parallel ranks, never averaged: losses are already divided by the mini-batch's tokens.
Adam runs on float32 main weights sharded over data-parallel ranks (ZeRO-1); SGD is not sharded, because Megatron's
DistributedOptimizer takes no other base than Adam. Norm, clipping and update are one kernel each for many weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhfuse.config.settings import OptimizerConfig
from rlhfuse.parallel.connect import GroupUse
from rlhfuse.parallel.device import Device, fake_cuda
from rlhfuse.parallel.offload import RestingTensors


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. `grad_norm` is before clipping; not `finite` means: nothing was changed."""

    grad_norm: float
    finite: bool
    lr: float


class ModelOptimizer:
    """Gradient buffers and optimizer of one model on this rank. The caller's program orders a step:

    sum_tied_gradients      tied embeddings, over first and last stage; blocks
    start_reduction(stage)  after the stage's last backward: the data-parallel sum starts, the call returns
    finish_reduction(stage) waits for the sum
    step                    gradient norm over all ranks of the model, clipping, update; gathering starts

    Weights are gathered beneath what follows: a stage's next forward waits for its own, `modules` for all.
    """

    def __init__(
        self,
        chunks: Mapping[int, torch.nn.Module],
        config: OptimizerConfig,
        groups: ProcessGroupCollection,
        device: Device,
    ) -> None:
        """`chunks`: pipeline stage -> its part, for each stage that this rank holds, ascending.

        Parts in host memory go to the device. Gradients have no memory until the first `zero_grad`.
        """
        self._config, self._groups, self._device = config, groups, device
        self._zero = config.name == "adam"
        self._replicated = dist.get_world_size(groups.dp) > 1  # else sums and gathers would copy what is there already
        dtype = next(next(iter(chunks.values())).parameters()).dtype
        if not self._zero:  # else Megatron takes the values over into a buffer on the device
            for chunk in chunks.values():
                chunk.to(device.torch_device)
        with fake_cuda(device), _meeting_among(groups.intra_dist_opt):
            # Any: Megatron's annotations know neither `buffers` nor what a chained optimizer has
            self._modules: dict[int, Any] = {
                stage: DistributedDataParallel(
                    config=cast(TransformerConfig, model.config),
                    ddp_config=DistributedDataParallelConfig(
                        use_distributed_optimizer=self._zero,
                        grad_reduce_in_fp32=True,
                        overlap_grad_reduce=True,
                        overlap_param_gather=self._zero,
                    ),
                    module=model,
                    pg_collection=groups,
                )
                for stage, model in chunks.items()
            }
            self.release_gradients()
            self.optimizer: Any = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer=config.name,
                    lr=config.lr,
                    min_lr=0.0,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.beta1,
                    adam_beta2=config.beta2,
                    adam_eps=config.eps,
                    sgd_momentum=0.0,
                    clip_grad=config.clip_grad,
                    bf16=dtype == torch.bfloat16,
                    params_dtype=dtype,
                    use_distributed_optimizer=self._zero,
                ),
                list(self._modules.values()),
                use_gloo_process_groups=False,
                pg_collection=groups,
            )
        for group in self.optimizer.param_groups:  # Megatron leaves this to its scheduler: vectors do not decay
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
            if self._zero and "fused" in group:  # torch's Adam; Apex's and Transformer Engine's always are
                group["fused"] = True
        self.states = RestingTensors(self._state_tensors, device)  # they may rest in host memory until `step`
        if self._zero:
            for stage, module in self._modules.items():
                module.disable_forward_pre_hook(param_sync=False)  # Megatron's own may start a gather in a forward
                module.register_forward_pre_hook(lambda *_, stage=stage: self._finish_gather(stage))

    @property
    def modules(self) -> dict[int, Any]:
        """By pipeline stage, with the weights of the last step."""
        self._finish_gathers()
        return self._modules

    @property
    def module(self) -> torch.nn.Module:
        """The only module of a model that has one stage on this rank."""
        (module,) = self.modules.values()
        return module

    def release_gradients(self) -> None:
        """Give the gradients' memory back; `zero_grad` takes it again."""
        for buffer in self._buffers():
            buffer.grad_data.untyped_storage().resize_(0)

    @property
    def held_bytes(self) -> int:
        """Weights and optimizer state on this rank's device, without gradients."""
        weights = sum(weight.nbytes for module in self._modules.values() for weight in module.parameters())
        kind, states = self._device.torch_device.type, self._state_tensors().values()
        return weights + sum(state.nbytes for state in states if state.device.type == kind)

    def zero_grad(self) -> None:
        for buffer in self._buffers():
            storage = buffer.grad_data.untyped_storage()
            if storage.nbytes() != buffer.grad_data.nbytes:
                storage.resize_(buffer.grad_data.nbytes)
        for weight in self._tied_weights():
            weight.head_grad = None
        for module in self._modules.values():
            module.zero_grad_buffer()
            for group in module.bucket_groups:
                group.is_last_microbatch = False  # no hook starts a reduction: `start_reduction` does
        self.optimizer.zero_grad()

    def sum_tied_gradients(self) -> None:
        """Sum gradients of tied embeddings over first and last stage; a collective of the ranks that hold them."""
        held = self._tied_weights()
        if len(held) == 2:  # both ends of the pipeline are on this rank
            total = held[0].main_grad + held[1].main_grad
            for weight in held:
                weight.main_grad.copy_(total)
        elif held and self._groups.embd is not None:
            dist.all_reduce(held[0].main_grad, group=self._groups.embd)

    def start_reduction(self, stage: int, finite: Tensor | None = None) -> None:
        """Start summing a stage's gradients over data-parallel ranks, once its last backward is done.

        Weights that tensor ranks hold whole but use in part are summed over these first, which blocks. With
        `finite` (a boolean) false, one element is made NaN, and with it the norm: no rank of the model can step.
        """
        module = self._modules[stage]
        for weight in module.parameters():
            if (head := getattr(weight, "head_grad", None)) is not None:  # of an output layer that is the embedding
                weight.main_grad.add_(head)
                weight.head_grad = None
        if finite is not None and (finite.is_cuda or not finite):  # asking a CUDA tensor would stop the queue
            self._counted_weight(stage).main_grad.view(-1)[:1].masked_fill_(~finite, math.nan)
        _allreduce_non_tensor_model_parallel_grads([module], module.config, self._groups.tp)
        if self._replicated:
            module.start_grad_sync()

    def reduction_done(self, stage: int) -> bool:
        """Whether the sum that `start_reduction` started is known to be there; gloo never says so before the wait."""
        if not self._replicated:
            return True
        handles = [group.grad_reduce_handle for group in self._modules[stage].bucket_groups]
        return all(handle is not None and all(work.is_completed() for work in handle.works) for handle in handles)

    def finish_reduction(self, stage: int) -> None:
        """Wait for the sum that `start_reduction` started."""
        if self._replicated:
            self._modules[stage].finish_grad_sync()

    def finish_gradients(self) -> None:
        """All of the above in one go, for a caller that has no program."""
        self.sum_tied_gradients()
        for stage in self._modules:
            self.start_reduction(stage)
        for stage in self._modules:
            self.finish_reduction(stage)

    def group_uses(self) -> list[GroupUse]:
        """What the model's groups but that of its tensor ranks are for."""
        buckets = [(b.grad_data, b.param_data) for buffer in self._buffers() for b in buffer.buckets]
        gradients, weights = max(buckets, key=lambda pair: pair[0].numel())
        uses = []
        if self._replicated and self._zero:
            uses = [
                GroupUse(self._groups.dp, "reduce_scatter", gradients.numel(), gradients.dtype),
                GroupUse(self._groups.dp, "all_gather", weights.numel(), weights.dtype),
            ]
        elif self._replicated:
            uses = [GroupUse(self._groups.dp, "all_reduce", gradients.numel(), gradients.dtype)]
        tied = self._tied_weights()
        if len(tied) == 1 and self._groups.embd is not None:
            uses.append(GroupUse(self._groups.embd, "all_reduce", tied[0].numel()))
        norm = self._groups.intra_dist_opt if self._zero else self._groups.mp
        return [*uses, GroupUse(norm, "all_reduce", self._ranks)]

    def dry_step(self) -> None:
        """Reduce gradients of zero and go through a step that changes no bit: every kernel and group has run then.

        A collective of all ranks of the model, after `zero_grad`.
        """
        self.finish_gradients()
        self.step(None)
        with fake_cuda(self._device):
            for part in self._parts():
                _step_a_spare_weight(part.optimizer)
            if self._zero and self._replicated:
                for module in self._modules.values():
                    module.start_param_sync(force_sync=True)

    def step(self, lr: float | None) -> StepResult:
        """One optimizer step at learning rate `lr`, of reduced gradients; a collective of all ranks of the model.

        None: the gradient's norm is measured, and weights and moments stay as they are.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr or 0.0
        with fake_cuda(self._device):
            self.optimizer.prepare_grads()
            norm = self._norm()
            if lr is None or not math.isfinite(norm):
                return StepResult(norm, math.isfinite(norm), lr or 0.0)
            if self._config.clip_grad > 0:
                self._clip(norm)
            self.states.wait()
            self._finish_gathers()  # of a step after which nothing ran
            self.optimizer.step_with_ready_grads()
            if self._zero and self._replicated:
                self._start_gather()
        return StepResult(norm, True, lr)

    def _start_gather(self) -> None:
        """Start gathering the weights that each data-parallel rank has updated; the calls return.

        It cannot stop a program. Only these ranks' group is used, in which each issues the same operations in the same
        order: reductions, then this. Whoever gathers waits for the others' steps of this mini-batch alone, which come
        before any wait for the gather: that is in the next forward, or with who reads the weights.
        """
        for module in self._modules.values():
            module.start_param_sync()

    def _finish_gathers(self) -> None:
        for stage in self._modules:
            self._finish_gather(stage)

    def _finish_gather(self, stage: int) -> None:
        """Let what follows wait for the stage's weights: the host on gloo, the current stream on NCCL."""
        for group in self._modules[stage].bucket_groups:
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()  # Megatron's own way starts a gather where one was reduced since
                group.param_gather_handle = None

    def _tied_weights(self) -> list:
        """Embedding and output layer of this rank where both are one matrix."""
        cores = [module.module for module in self._modules.values()]
        return [
            core.shared_embedding_or_output_weight()
            for core in cores
            if core.share_embeddings_and_output_weights and (core.pre_process or core.post_process)
        ]

    def _counted_weight(self, stage: int) -> Any:
        """A weight of a stage whose gradient on this rank is in the norm: of copies the norm counts one."""
        for weight in self._modules[stage].parameters():
            if param_is_not_shared(weight) and param_is_not_tensor_parallel_duplicate(weight, self._groups.tp):
                return weight
        raise RuntimeError(f"stage {stage}: no gradient of this rank is in the norm; a stage has at least one layer")

    @property
    def _ranks(self) -> int:
        return self._groups.pp.size() * self._groups.tp_dp_cp.size()

    def _norm(self) -> float:
        """The gradient's norm over all ranks of the model; Megatron's own reads one for each weight.

        Squares are added up by place, pipeline and tensor rank, the last first: wherever the model lies, however its
        group is sorted and in whatever order a backend adds, it is the same to the last bit.
        """
        gradients = [gradient for part in self._parts() for gradient in part.get_main_grads_for_grad_norm()]
        squares = torch.zeros(self._ranks, device=self._device.torch_device)  # of others 0, which changes no sum
        if gradients:
            norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
            own = self._groups.pp.rank() * self._groups.tp_dp_cp.size() + self._groups.tp_dp_cp.rank()
            squares[own] = torch.stack(norms).square().sum()
        dist.all_reduce(squares, group=self.optimizer.get_grad_stats_parallel_group())
        sums = np.add.accumulate(squares.cpu().numpy()[::-1])
        return float(torch.tensor(sums[-1]).sqrt())

    def _clip(self, norm: float) -> None:
        """Scale this rank's gradients so that the norm is at most the setting's."""
        coefficient = self._config.clip_grad / (norm + 1e-6)  # Megatron's
        if coefficient < 1:
            for part in self._parts():
                gradients = [weight.grad for weight in part.get_parameters() if weight.grad is not None]
                torch._foreach_mul_(gradients, coefficient)  # pyright: ignore[reportPrivateImportUsage]

    def _buffers(self) -> list:
        """Megatron's gradient buffers; weights' gradients are views of them and stay so when memory goes and comes."""
        return [buffer for module in self._modules.values() for buffer in module.buffers]

    def _state_tensors(self) -> dict[str, Tensor]:
        """Float32 main weights [n] of lower-precision ones, and Adam's moments [n] once there are some."""
        tensors = {}
        for number, part in enumerate(self._parts()):
            mains = getattr(part, "shard_fp32_from_float16_groups", getattr(part, "fp32_from_float16_groups", ()))
            own = {id(main) for group in mains for main in group}
            weights = [weight for group in part.optimizer.param_groups for weight in group["params"]]
            for place, weight in enumerate(weights):
                if id(weight) in own:
                    tensors[f"{number}.{place}.main"] = weight
                for kind, state in part.optimizer.state.get(weight, {}).items():
                    if torch.is_tensor(state) and state.shape == weight.shape:
                        tensors[f"{number}.{place}.{kind}"] = state
        return tensors

    def _parts(self) -> list:
        """Megatron's optimizers that hold weights here; a rank whose shard is empty has a stub."""
        return [part for part in self.optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]


def _step_a_spare_weight(optimizer: Any) -> None:
    """One step of torch's optimizer on a weight of its own: the same kernels, and nothing of the model is touched."""
    groups, state = optimizer.param_groups, optimizer.state
    settings = next(group for group in groups if group["params"])
    spare = torch.nn.Parameter(torch.zeros_like(settings["params"][0].detach().view(-1)[:1]))
    spare.grad = torch.zeros_like(spare)
    optimizer.param_groups, optimizer.state = [{**settings, "params": [spare]}], defaultdict(dict)
    try:
        optimizer.step()
    finally:
        optimizer.param_groups, optimizer.state = groups, state


@contextmanager
def _meeting_among(group: dist.ProcessGroup) -> Iterator[None]:
    """Let Megatron gather the keys of parameter groups over the ranks of one model; it would ask the world."""
    gather = dist.all_gather_object

    def among(found: list[Any], keys: Any) -> None:
        found[:] = [None] * dist.get_world_size(group)
        gather(found, keys, group=group)

    dist.all_gather_object = among
    try:
        yield
    finally:
        dist.all_gather_object = gather
