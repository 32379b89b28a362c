"""Facts about a model, a parallel layout and a machine, as frozen values.

`ModelSpec` is what a Hugging Face config.json says about a decoder; `ParallelLayout` is the text
`d2t2p4@0-15` as numbers; `HardwareSpec` is one device and its links. None of them knows torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import LARGEST, JsonModel, parse_json, read_json
from rlhfuse.base.parallel_layout import ParallelLayout

MOST_LAYERS = 10_000  # of a model
Size = Annotated[int, Field(ge=1, le=LARGEST)]
ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"}
# Keys of config.json that change what a model computes, and the only value of each that is implemented.
IMPLEMENTED = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1, "quantization_config": None}
BIASED = ("llama", "qwen3")  # where attention_bias adds one to query, key, value and output projection
VOCAB_MULTIPLE = 64  # the padded vocabulary divides by every tensor degree up to this


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 or linear rescaling of the rotary frequencies."""

    kind: str  # "linear" or "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a Llama-like decoder. Sizes are in elements, `context` in tokens."""

    architecture: str  # a key of ARCHITECTURES
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    context: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    proj_bias: bool = False  # of attention's output projection
    qk_norm: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    sliding_window: bool = False  # it cuts `context`: within the window sliding attention is full attention
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        bias = self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        bias += self.hidden if self.proj_bias else 0
        return attention + bias + 3 * self.hidden * self.mlp + self.norm_parameters

    @property
    def norm_parameters(self) -> int:
        """Parameters of a layer's norms; every tensor rank holds them whole."""
        return 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding as built: the vocabulary rounded up to a multiple of VOCAB_MULTIPLE."""
        return -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def parameters(self, scalar_head: bool = False) -> int:
        """Parameter count; with `scalar_head` the output layer is one row of `hidden` numbers."""
        body = self.layers * self.layer_parameters + self.hidden + self.embedding_parameters
        logits = 0 if self.tied_embeddings else self.embedding_parameters
        return body + (self.hidden if scalar_head else logits)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of key and value of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    @staticmethod
    def from_config(path: str | Path) -> ModelSpec:
        """Read `config.json` of a Hugging Face folder; the end tokens of its `generation_config.json` come first.

        Raises InputError naming the file and the field.
        """
        file, generation = Path(path) / "config.json", Path(path) / "generation_config.json"
        if not file.exists():
            raise InputError(f"{file} is missing: {path} is no Hugging Face model folder; give its path")
        raw, said = (_read(source) if source.exists() else {} for source in (file, generation))
        ends = said.get("eos_token_id")
        return _from_config_dict(raw if ends is None else raw | {"eos_token_id": ends}, str(file))

    def check_layout(self, layout: ParallelLayout, task: str) -> None:
        """Raise InputError with the division that fails when the model cannot be cut this way."""
        shares = ("heads", self.heads), ("kv_heads", self.kv_heads), ("mlp", self.mlp)
        for name, value in (*shares, ("padded vocab", self.padded_vocab)):
            if value % layout.tp:
                raise InputError(f"{task}={layout}: {name}({value}) % tp({layout.tp}) = {value % layout.tp}, must be 0")
        if layout.stages > self.layers:
            stages = f"pp({layout.pp})" + (f" * chunks({layout.chunks}) = {layout.stages}" if layout.chunks > 1 else "")
            raise InputError(f"{task}={layout}: {stages} > layers({self.layers}); use a smaller pp")
        if layout.cut is not None and (total := sum(layout.cut)) != self.layers:
            raise InputError(f"{task}={layout}: {total} layers in all stages != layers({self.layers})")


def _read(file: Path) -> dict[str, Any]:
    raw = read_json(file, own=False, fix="download the checkpoint again")
    if not isinstance(raw, dict):
        raise InputError(f"{file} must be a JSON object, not {type(raw).__name__}; download the checkpoint again")
    return raw


class _ConfigJson(JsonModel, extra="ignore"):
    """What is read of config.json; null stands for what is not said."""

    num_hidden_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    hidden_size: Size
    num_attention_heads: Size
    intermediate_size: Size
    vocab_size: Size
    max_position_embeddings: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    sliding_window: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    use_sliding_window: bool | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6
    bos_token_id: int | None = None


def _from_config_dict(raw: dict, where: str) -> ModelSpec:
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise InputError(f"{where}: model_type {kind!r} is not supported; use one of {', '.join(ARCHITECTURES)}")

    form = parse_json(_ConfigJson, raw, where)
    heads, context = form.num_attention_heads, form.max_position_embeddings
    kv_heads = form.num_key_value_heads or heads
    if heads % kv_heads or heads > form.hidden_size and form.head_dim is None:
        shares = f"num_key_value_heads={kv_heads} must divide it, hidden_size={form.hidden_size} be no less"
        raise InputError(f"{where}: num_attention_heads={heads}: {shares}")
    window = _sliding_window(raw, kind) or context
    rope = form.rope_parameters or {}
    scaling = form.rope_scaling or rope
    ends = raw.get("eos_token_id")
    ends = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    if wrong := [token for token in ends if type(token) is not int or not 0 <= token < form.vocab_size]:
        ids = f"an id in [0, {form.vocab_size})"
        raise InputError(f"{where}, generation_config.json: eos_token_id {wrong[0]!r} is not {ids}")
    _check_implemented(raw | scaling, kind, where)
    biased = kind in BIASED and bool(form.attention_bias)
    return ModelSpec(
        architecture=kind,
        layers=form.num_hidden_layers,
        hidden=form.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=form.head_dim or form.hidden_size // heads,
        mlp=form.intermediate_size,
        vocab=form.vocab_size,
        context=min(context, window),
        tied_embeddings=bool(form.tie_word_embeddings),
        qkv_bias=kind == "qwen2" or biased,
        proj_bias=biased,
        qk_norm=kind == "qwen3",
        rope_theta=form.rope_theta or _number(rope, "rope_theta", where, 10000.0),
        rope_scaling=_rope_scaling(scaling, where),
        norm_eps=form.rms_norm_eps,
        sliding_window=window < context,
        bos_token_id=form.bos_token_id,
        eos_token_ids=ends,
    )


def _check_implemented(raw: dict, kind: str, where: str) -> None:
    only = IMPLEMENTED if kind in (*BIASED, "qwen2") else IMPLEMENTED | {"attention_bias": False}
    for key, value in only.items():  # qwen2 has its biases whatever the key says
        if raw.get(key, value) not in (value, None):
            raise InputError(
                f"{where}: {key}={shorten(json.dumps(raw[key]), 60)} is not supported; only {json.dumps(value)} is"
            )


def _sliding_window(raw: dict, kind: str) -> int | None:
    """Tokens that a layer looks back on; None: on all. Defaults are those of transformers."""
    slides = kind in ("mistral", "phi3") or kind.startswith("qwen") and raw.get("use_sliding_window")
    return raw.get("sliding_window", None if kind == "phi3" else 4096) if slides else None


def _number(raw: dict, name: str, where: str, default: float | None = None) -> float:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
        raise InputError(f"{where} has {name} {value!r:.40}; a number in (0, {LARGEST}] is needed")
    return float(value)


def _rope_scaling(raw: dict, where: str) -> RopeScaling | None:
    kind = raw.get("rope_type", raw.get("type", "default"))
    number = partial(_number, raw, where=f"{where}: rope scaling {kind!r}")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", number("factor"))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        return RopeScaling("llama3", number("factor"), low, high, int(number("original_max_position_embeddings")))
    raise InputError(f"{where}: rope scaling {kind!r} is not supported; default, linear and llama3 are")


@dataclass(frozen=True)
class DeviceKind:
    """What CPUs and GPUs do differently, as far as a plan counts it."""

    own_memory: bool  # apart from the host's, whose copies and batches then take none of it
    in_turns: bool  # a core reads and multiplies one after the other; on a GPU one hides the other
    shared_cores: bool  # ranks compute on the cores of their machine
    recorded_steps: bool  # decode steps are recorded: what starts up in one is in its floor
    # How programs reduce gradients, see `lower`. On a GPU what waits for another rank occupies the device, whichever
    # communicator it is in, and may hold up whatever comes after it: programs must run with one queue per rank.
    reduction: Literal["early", "joint"]
    scatters_wholly: bool  # a reduce-scatter sends what an all-reduce does, as gloo's

    @staticmethod
    def of(hardware: str) -> DeviceKind:
        """Kind of the devices of hardware that is called so; of a list of several, GPUs."""
        return CPU if hardware == "cpu" else GPU


CPU = DeviceKind(
    own_memory=False, in_turns=True, shared_cores=True, recorded_steps=False, reduction="early", scatters_wholly=True
)
GPU = DeviceKind(
    own_memory=True, in_turns=False, shared_cores=False, recorded_steps=True, reduction="joint", scatters_wholly=False
)


@dataclass(frozen=True)
class HardwareSpec:
    """One device and what connects devices; rates are what is reached, not the data sheet's."""

    __pydantic_config__ = {"extra": "forbid"}  # of its JSON form

    name: str
    flops: float  # multiply-adds count as two, per second
    memory_bandwidth: float  # bytes/s
    memory_bytes: float
    node_link_bandwidth: float  # bytes/s between two devices of one node
    cross_link_bandwidth: float  # bytes/s per device between nodes
    host_bandwidth: float  # bytes/s between host and device memory
    launch_seconds: float  # floor of one layer's forward: its kernels launched one after the other; on a CPU added
    devices_per_node: int = 8
    decode_layer_seconds: float = 0.0  # of a layer's decode step, beside its work: kernels that start and end
    pass_seconds: float = 0.0  # of a micro-batch through a stage, each way, or of a scored pack, beside its layers
    call_seconds: float = 0.0  # of every call of a model on its mesh: gathering its batch, asking its workers
    switch_sums: bool = False  # the switch between the devices of a node adds what they send
    collective_seconds: float = 0.0  # start-up of one step of a collective, or a send, within a node
    cross_collective_seconds: float = 0.0  # the same between nodes
    moved_share: float = 1.0  # of its memory's bandwidth, what kernels between matrix products reach
    gather_share: float = 1.0  # of its links' bandwidth, what reduce-scatters and all-gathers of weights reach
    step_waiting: float = 1.0  # how many times longer an optimizer step takes while other ranks have this one's cores
    process_bytes: int = 0  # of `memory_bytes`, what a rank's process takes beside models: interpreter, libraries
    communicator_bytes: int = 0  # the same of each group of its in which many ranks communicate
    channel_bytes: int = 0  # and of each that only sends to one rank, or receives from one
    host_memory_bytes: float = 0.0  # of a machine with GPUs
    host_process_bytes: int = 0  # of those, a rank's process beside copies of weights
    backward_launch_seconds: float = 0.0  # floor of one layer's backward; 0: not measured
    half_rate_tokens: float = 0.0  # of a forward, at which its layers' products reach half of `flops`; 0: not measured
    recorded_launch_seconds: float = 0.0  # what recording a decode step as a CUDA graph takes for each launch in it
    short_sum_seconds: float = 0.0  # least of an all-reduce of a recorded decode step, whose messages are short
    switch_sum_seconds: float = 0.0  # the same by the switch
    source: str = ""  # the device and the day on which the numbers that `measured` names were measured
    measured: tuple[str, ...] = ()  # what it names not is assumed

    @property
    def device(self) -> DeviceKind:
        return DeviceKind.of(self.name)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            positive = entry.name in ("flops", "memory_bytes") or entry.name.endswith("_bandwidth")
            if isinstance(value, (int, float)) and not (0 <= value < math.inf and (value or not positive)):
                wanted = "a positive number" if positive else "a number that is not negative"
                raise InputError(f"hardware {self.name}: {entry.name} is {value}; {wanted} is needed")
