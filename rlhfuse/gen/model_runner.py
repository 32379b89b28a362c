"""The model as generation sees it: weights are read in place, under their Megatron-core names.

Binds and checks the weights, and chooses who computes: the kernels for CPU (cpu_forward.py) or device_forward.py.

    x = embedding[token]
    per layer:  x += proj(attention(rope(qkv(norm(x))), cache));  x += fc2(silu(gate) * up),  [gate, up] = fc1(norm(x))
    logits = output(norm(x)), at the rows that draw

With a tensor-parallel group each rank holds a share of heads, MLP columns and vocabulary rows; the outputs of proj
and fc2 are summed over the ranks and the logits are gathered, so that all ranks see the same numbers. Knows nothing
of sequences, scheduling or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.config.spec import ModelSpec
from rlhfuse.errors import InputError
from rlhfuse.gen.cpu.forward import CpuForward
from rlhfuse.gen.forward_batch import ForwardBatch
from rlhfuse.gen.gpu.forward import DeviceForward
from rlhfuse.gen.gpu.rotary import rotary_tables
from rlhfuse.gen.kv_cache import KVCache
from rlhfuse.gen.tensor_parallel import TensorParallel
from rlhfuse.gen.weights import LayerWeights, ModelWeights

Kernels = Literal["auto", "torch"]


class ModelRunner:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
        tp_group: dist.ProcessGroup | None = None,
        max_sequences: int = 256,
        kernels: Kernels = "auto",
        cuda_graphs: bool = True,
    ) -> None:
        """`max_sequences`, `kernels`, `cuda_graphs`: as in EngineOptions."""
        self.spec, self.device, self.dtype, self.tp_group = spec, device, dtype, tp_group
        self.parallel = TensorParallel(tp_group)
        self.tp_size = self.parallel.size
        for name, value in (("heads", spec.heads), ("kv_heads", spec.kv_heads), ("mlp", spec.mlp)):
            if value % self.tp_size:
                raise InputError(f"{name}({value}) % tp({self.tp_size}) = {value % self.tp_size}, must be 0")
        self.heads, self.kv_heads = spec.heads // self.tp_size, spec.kv_heads // self.tp_size
        self.cos, self.sin = rotary_tables(spec, device)
        self.uses_cpu_kernels = device.type == "cpu" and kernels == "auto"
        self._cpu_forward: CpuForward | None = None
        self._device_forward: DeviceForward | None = None
        if self.uses_cpu_kernels:
            self._cpu_forward = CpuForward(self)
        else:
            recorder = DeviceForward.recorder_for(device, cuda_graphs)
            self._device_forward = DeviceForward(
                spec, self.parallel, device=device, max_sequences=max_sequences, recorder=recorder
            )
        self.weights: ModelWeights | None = None
        self.bind(weights)

    @property
    def spare_blocks(self) -> int:
        """Blocks that a cache must have besides those of sequences, at its end."""
        return 0 if self._device_forward is None else self._device_forward.spare_blocks

    @property
    def recording_seconds(self) -> float:
        """Seconds spent on capturing CUDA graphs since the beginning."""
        return 0.0 if self._device_forward is None else self._device_forward.recording_seconds

    def release(self) -> None:
        """Give back what was built over the cache, which the caller is about to drop, and working memory."""
        if self._cpu_forward is not None:
            self._cpu_forward.space.clear()
        if self._device_forward is not None:
            self._device_forward.release()

    @property
    def bound(self) -> bool:
        """Whether there are weights to read."""
        return self.weights is not None

    def unbind(self) -> None:
        """Let go of the weights, so that their memory can be given back; `bind` comes before the next step."""
        self.weights = None
        for forward in (self._cpu_forward, self._device_forward):
            if forward is not None:
                forward.unbind()

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Read from these tensors from now on. Raises InputError naming a missing or ill-shaped one."""
        spec = self.spec

        def take(name: str, *shape: int) -> Tensor:
            if name not in weights:
                raise InputError(f"weights lack {name}; give one tensor for each name of this model")
            tensor = weights[name].detach()
            if tuple(tensor.shape) != shape or tensor.dtype != self.dtype or tensor.device.type != self.device.type:
                raise InputError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device.type}, "
                    f"but {self.dtype} {list(shape)} on {self.device.type} is needed (tp={self.tp_size})"
                )
            return tensor

        embedding = "embedding.word_embeddings.weight"
        rows = weights[embedding].shape[0] if embedding in weights else 0
        if embedding in weights and rows * self.tp_size < spec.vocab:
            raise InputError(f"{embedding} has {rows} rows on each of {self.tp_size} ranks, vocab is {spec.vocab}")
        heads_dim = self.heads * spec.head_dim
        qkv_dim = heads_dim + 2 * self.kv_heads * spec.head_dim
        mlp = spec.mlp // self.tp_size

        def layer(number: int) -> LayerWeights:
            p = f"decoder.layers.{number}."
            return LayerWeights(
                input_norm=take(p + "input_layernorm.weight", spec.hidden),
                qkv=take(p + "self_attention.linear_qkv.weight", qkv_dim, spec.hidden),
                qkv_bias=take(p + "self_attention.linear_qkv.bias", qkv_dim) if spec.qkv_bias else None,
                q_norm=take(p + "self_attention.q_layernorm.weight", spec.head_dim) if spec.qk_norm else None,
                k_norm=take(p + "self_attention.k_layernorm.weight", spec.head_dim) if spec.qk_norm else None,
                proj=take(p + "self_attention.linear_proj.weight", spec.hidden, heads_dim),
                mlp_norm=take(p + "pre_mlp_layernorm.weight", spec.hidden),
                fc1=take(p + "mlp.linear_fc1.weight", 2 * mlp, spec.hidden),
                fc2=take(p + "mlp.linear_fc2.weight", spec.hidden, mlp),
            )

        # Everything is checked before anything is replaced: after an InputError the old weights still serve.
        found = take(embedding, rows, spec.hidden)
        layers = [layer(number) for number in range(spec.layers)]
        final_norm = take("decoder.final_layernorm.weight", spec.hidden)
        output = found if spec.tied_embeddings else take("output_layer.weight", rows, spec.hidden)
        self.weights = ModelWeights(found, tuple(layers), final_norm, output)
        for forward in (self._cpu_forward, self._device_forward):
            if forward is not None:
                forward.bind(self.weights)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Run one step, filling the cache. Returns float32 logits [R or more rows, vocab], one row per drawing row.

        Rows past R, if any, are padding.
        """
        if self._device_forward is not None:
            return self._device_forward.forward(batch, cache)
        assert self._cpu_forward is not None
        return self._cpu_forward.forward(batch, cache)
