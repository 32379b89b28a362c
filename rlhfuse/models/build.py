"""A role's model as a Megatron-core GPTModel: one pipeline stage of one tensor rank, on given groups.

Megatron's own attention block, MLP and parallel linear layers, with an RMSNorm and a core attention for packed
sequences (`thd`) in their slots, or Transformer Engine's in all of these. Dropout is 0. Weights are unset until they
are loaded. Global parallel state is not used, but for the gather buffer of sequence parallelism.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
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
from torch.utils.checkpoint import checkpoint

from rlhfuse.config.settings import ParallelConfig, TrainerConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import Recompute, known
from rlhfuse.models.attention.backends import varlen_attention
from rlhfuse.models.heads import ScalarHead, VocabularyHead
from rlhfuse.models.layers.operations import Operations, operations_for
from rlhfuse.models.layers.remade_input import remake_inputs
from rlhfuse.models.layers.rotation import RotaryTables
from rlhfuse.models.layers.transformer_engine import LayerSlots, transformer_engine_slots
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
    """Megatron's norm slot: root-mean-square norm over the last dimension."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, operations: Operations, **_: Any
    ) -> None:
        super().__init__()
        self.eps, self._operations = eps, operations
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of such weights over tensor ranks: each sees the tokens of its own part only
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        return self._operations.rms_norm(x, self.weight, self.eps)


class PackedCoreAttention(torch.nn.Module):
    """Megatron's core-attention slot for packed sequences, rotary embedding included, which Megatron's own block would
    slice sequence by sequence: q [T, heads, D], k and v [T, kv_heads, D]."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, rotary: RotaryTables, **__: Any) -> None:
        super().__init__()
        self._rotary = rotary

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        """[T, heads * D]. Causal within each sequence; there is no mask to pass."""
        sequences = packed_seq_params.sequences
        return varlen_attention(query, key, value, self._rotary.up_to(sequences.longest), sequences).flatten(1)


class SwiGLU(torch.nn.Module):
    """For the slot in Megatron's MLP of an activation that takes gate and up together."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_and_up: Tensor) -> Tensor:
        return operations_for(gate_and_up.device).swiglu(gate_and_up)


def with_bias(row: Any) -> Any:
    """Linear layers like `row` for attention's output projection: Megatron gives a bias to all of them or none."""

    class BiasedProjection(row):
        def __init__(self, *sizes: int, bias: bool, **settings: Any) -> None:
            super().__init__(*sizes, bias=True, **settings)

    return BiasedProjection


class RecomputedLayer(TransformerLayer):
    """Keeps its input alone for the backward, which runs the layer again: the same operations, the same bits."""

    def forward(self, hidden_states: Tensor, **inputs: Any) -> Any:
        """[T, 1, H] -> ([T, 1, H], None)."""
        if not torch.is_grad_enabled():
            return super().forward(hidden_states, **inputs)
        # Megatron's own saves random-number states of CUDA; nothing here is random. A backward within the backward sees
        # the weights themselves, as layers want that add to `main_grad`; torch's other way shows them copies.
        run = partial(super().forward, **inputs)
        return checkpoint(run, hidden_states, use_reentrant=True, preserve_rng_state=False)


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
        activation_func=torch.nn.functional.silu,  # of which SwiGLU is made, in the slot that this switch opens:
        use_te_activation_func=True,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        calculate_per_token_loss=True,
    )


def local_slots(rotary: RotaryTables, device: torch.device) -> LayerSlots:
    return LayerSlots(
        tensor_parallel.ColumnParallelLinear,
        tensor_parallel.RowParallelLinear,
        ModuleSpec(module=RMSNorm, params={"operations": operations_for(device)}),
        ModuleSpec(module=PackedCoreAttention, params={"rotary": rotary}),
    )


def layer_spec(spec: ModelSpec, slots: LayerSlots, recompute: Recompute = "none") -> ModuleSpec:
    """One decoder layer."""
    norm = slots.norm
    head_norm = norm if spec.qk_norm else IdentityOp
    return ModuleSpec(
        module=RecomputedLayer if recompute == "full" else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=slots.column,
                    core_attention=slots.attention,
                    linear_proj=with_bias(slots.row) if spec.proj_bias else slots.row,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]  Megatron takes functions
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=slots.column,
                    linear_fc2=slots.row,
                    activation_func=SwiGLU,
                ),
            ),
            mlp_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
        ),
    )


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
    transformer_engine: bool = False,
) -> GPTModel:
    """One pipeline stage of the model that `rank` holds in `grid`, for the device, with unset weights.

    `stage` may be left out where a rank holds one. `on_host`: the weights are in host memory, which the system gives
    when they are written: for who fills them there, or takes the device's memory for them later.
    `transformer_engine`: with its layers, of the same weights.
    """
    if stage is None:
        (stage,) = grid.stages_of(rank)
    layout, layers = grid.layout, grid.layout.stage_layers(spec.layers)
    shards = activations.sequence_parallel and layout.tp > 1
    place = Device(torch.device("cpu"), device.backend) if on_host else device
    config = transformer_config(spec, layout.tp, layout.pp, dtype, place.torch_device, shards)
    rotary = RotaryTables(spec, device.torch_device)
    slots = transformer_engine_slots(rotary) if transformer_engine else local_slots(rotary, device.torch_device)
    layer = layer_spec(spec, slots, activations.recompute)
    if shards:
        _prepare_sequence_parallel()
    unset: Any = copy(groups)
    unset.embd = None  # tied ends would be made equal in a collective; each is loaded
    with fake_cuda(place):
        model: Any = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(  # pyright: ignore[reportArgumentType]
                layer_specs=[layer] * len(layers[stage]), layer_norm=slots.norm
            ),
            vocab_size=spec.padded_vocab,
            max_sequence_length=spec.context,
            pre_process=stage == 0,
            post_process=stage == layout.stages - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=spec.tied_embeddings and not scalar_head,
            position_embedding_type="none",  # PackedCoreAttention has it
            pg_collection=unset,
        )
    _mark_tensor_parallel(model)
    for offset, decoder_layer in enumerate(model.decoder.layers):
        decoder_layer.layer_number = layers[stage][offset] + 1  # the resharder names layers by this
        if activations.recompute == "selective":
            remake_inputs(decoder_layer)
    if stage == layout.stages - 1 and scalar_head:
        gathered = groups.tp if shards else None
        model.output_layer = ScalarHead(spec.hidden, dtype, device.torch_device, gathered, on_host=on_host)
    elif stage == layout.stages - 1:
        model.output_layer = VocabularyHead(model.output_layer.weight, groups.tp, shards)
    model.to(place.torch_device)
    return model


def _prepare_sequence_parallel() -> None:
    """Make what Megatron keeps per process: a buffer to gather into, and a tracker of no random numbers."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)


def _mark_tensor_parallel(model: Any) -> None:
    """Say which weights are cut over tensor ranks, and how: Megatron says it only while it initialises them."""
    by_rows = tensor_parallel.ColumnParallelLinear | tensor_parallel.VocabParallelEmbedding
    for module in model.modules():
        engines = getattr(module, "parallel_mode", None)  # what Transformer Engine's linear layers say
        if isinstance(module, tensor_parallel.RowParallelLinear) or engines == "row":
            dim = 1
        elif isinstance(module, by_rows) or engines == "column":
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
