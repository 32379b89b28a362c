"""A role's model as a Megatron-core GPTModel: one pipeline stage of one tensor rank, on given groups.

Embedding and output layer run in Megatron's model. Its decoder layers and final norm hold their weights, for optimizer,
checkpoints and resharding, and a FlatStack runs them. Weights are unset until they are loaded.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from rlhfuse.config.settings import ParallelConfig, TrainerConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import Recompute, known
from rlhfuse.models.heads import ScalarHead, VocabularyHead
from rlhfuse.models.layers.rotation import RotaryTables
from rlhfuse.models.stack.cpu_ops import CpuOps
from rlhfuse.models.stack.flat_stack import FlatStack
from rlhfuse.models.stack.torch_ops import HeadShape, TorchOps
from rlhfuse.parallel.device import Device, fake_cuda
from rlhfuse.parallel.groups import ModelGrid


@dataclass(frozen=True)
class Activations:
    """How a training model keeps what its backward needs."""

    sequence_parallel: bool = False  # between the matrix products each tensor rank holds its part of the tokens
    recompute: Recompute = "none"  # full: the input of each layer alone, which runs again before its backward

    @staticmethod
    def of(parallel: ParallelConfig, trainer: TrainerConfig) -> Activations:
        """As a run's settings say, of which none is open any more."""
        return Activations(parallel.sequence_parallel, known(trainer.recompute, "none"))


WHOLE = Activations()


class RMSNorm(torch.nn.Module):
    """Megatron's norm slot: the weight of a root-mean-square norm, which the stack computes."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of such weights over tensor ranks: each sees the tokens of its own part only
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


def with_bias(row: Any) -> Any:
    """Linear layers like `row` for attention's output projection: Megatron gives a bias to all of them or none."""

    class BiasedProjection(row):
        def __init__(self, *sizes: int, bias: bool, **settings: Any) -> None:
            super().__init__(*sizes, bias=True, **settings)

    return BiasedProjection


def transformer_config(
    spec: ModelSpec, tp: int, pp: int, dtype: torch.dtype, device: torch.device, sequence_parallel: bool = False
) -> TransformerConfig:
    """Megatron's configuration of this shape. Gradients are summed, not averaged, over data-parallel ranks.

    Megatron's fusions stay at its defaults, which is off. Those of rope and of gradient accumulation need packages that
    may be absent (Transformer Engine, apex); bias_dropout_fusion has nothing to fuse without bias and dropout; that of
    the activation is torch.compile, which compiles and synchronises with the device in the middle of a step, where a
    receive posted ahead may wait for what this rank is yet to launch.
    """
    return TransformerConfig(
        # Megatron wants a multiple of pp; each stage's true layers are given to build_model's GPTModel.
        num_layers=-(-spec.layers // pp) * pp,
        hidden_size=spec.hidden,
        ffn_hidden_size=spec.mlp,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        calculate_per_token_loss=True,
    )


def layer_spec(spec: ModelSpec) -> ModuleSpec:
    """One decoder layer: modules that hold its weights, and that nothing runs."""
    head_norm = RMSNorm if spec.qk_norm else IdentityOp
    column, row = tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear
    attention = SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=IdentityOp,
        linear_proj=with_bias(row) if spec.proj_bias else row,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    causal = {"attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(module=SelfAttention, params=causal, submodules=attention),
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
        ),
    )


def layer_ops(rotary: RotaryTables, shape: HeadShape, eps: float, dtype: torch.dtype, device: torch.device) -> TorchOps:
    """The kernels of decoder layers with such heads on this device."""
    if device.type == "cuda":
        from rlhfuse.models.stack.cuda_ops import CudaOps  # Triton is not for runs on the CPU

        return CudaOps(rotary, shape, eps, device)
    kind = CpuOps if dtype == torch.float32 else TorchOps
    return kind(rotary, shape, eps, device)


def build_model(
    spec: ModelSpec,
    grid: ModelGrid,
    groups: ProcessGroupCollection,
    rank: int,
    *,
    scalar_head: bool,
    dtype: torch.dtype,
    device: Device,
    stage: int | None = None,
    activations: Activations = WHOLE,
    on_host: bool = False,
) -> GPTModel:
    """One pipeline stage of the model that `rank` holds in `grid`, for the device, with unset weights.

    `stage` may be left out where a rank holds one. `on_host`: the weights are in host memory, which the system gives
    when they are written: for who fills them there, or takes the device's memory for them later.
    """
    if stage is None:
        (stage,) = grid.stages_of(rank)
    layout, layers = grid.layout, grid.layout.stage_layers(spec.layers)
    shards = activations.sequence_parallel and layout.tp > 1
    place = Device(torch.device("cpu"), device.backend) if on_host else device
    config = transformer_config(spec, layout.tp, layout.pp, dtype, place.torch_device, shards)
    if shards:
        # Megatron keeps it per process: a tracker of no random numbers.
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    unset: Any = copy(groups)
    unset.embd = None  # tied ends would be made equal in a collective; each is loaded
    with fake_cuda(place):
        model: Any = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                [layer_spec(spec)] * len(layers[stage]),
                RMSNorm,  # pyright: ignore[reportArgumentType]
            ),
            vocab_size=spec.padded_vocab,
            max_sequence_length=spec.context,
            pre_process=stage == 0,
            post_process=stage == layout.stages - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=spec.tied_embeddings and not scalar_head,
            position_embedding_type="none",  # the stack has it
            pg_collection=unset,
        )
    _mark_tensor_parallel(model)
    for offset, decoder_layer in enumerate(model.decoder.layers):
        decoder_layer.layer_number = layers[stage][offset] + 1  # the resharder names layers by this
    shape, rotary = HeadShape.of(spec, layout.tp), RotaryTables(spec, device.torch_device)
    ops = layer_ops(rotary, shape, spec.norm_eps, dtype, device.torch_device)
    model.decoder = FlatStack(model.decoder, ops, activations.recompute, groups.tp, shards)
    if stage == layout.stages - 1 and scalar_head:
        gathered = groups.tp if shards else None
        model.output_layer = ScalarHead(spec.hidden, dtype, device.torch_device, gathered, on_host=on_host)
    elif stage == layout.stages - 1:
        model.output_layer = VocabularyHead(model.output_layer.weight, groups.tp, shards)
    model.to(place.torch_device)
    return model


def _mark_tensor_parallel(model: Any) -> None:
    """Say which weights are cut over tensor ranks, and how: Megatron says it only while it initialises them."""
    by_rows = tensor_parallel.ColumnParallelLinear | tensor_parallel.VocabParallelEmbedding
    for module in model.modules():
        if isinstance(module, tensor_parallel.RowParallelLinear):
            dim = 1
        elif isinstance(module, by_rows):
            dim = 0
        else:
            continue
        facts = dict(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)
        for held in (module.weight, None if dim else getattr(module, "bias", None)):
            if isinstance(held, torch.nn.Parameter):
                vars(held).update(facts)
    for layer in model.decoder.layers:
        layer.mlp.linear_fc1.weight.partition_stride = 2  # [gate, up] of each rank: two cuts interleave


@torch.no_grad()
def fill(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Move `weights` (names of models/hf.py) into the model, one by one; both must hold exactly the same names."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != weights.keys():
        difference = sorted(parameters.keys() ^ weights.keys())
        raise KeyError(f"weights and model differ in {len(difference)} names, the first is {difference[0]}")
    for name, parameter in parameters.items():
        parameter.copy_(weights.pop(name))
