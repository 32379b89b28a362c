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
from rlhfuse.base.files import is_listed
from rlhfuse.base.json_values import LARGEST, JsonModel, parse_json, read_json
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.config_json import ARCHITECTURES, DEFAULTS, IMPLEMENTED, NOT_NULL, WITHOUT_EFFECT
from rlhfuse.tasks.role import Role

MOST_LAYERS = 10_000  # of a model
MOST_REAL = 1e30  # of the rotary embedding's numbers, which float32 holds
Size = Annotated[int, Field(ge=1, le=LARGEST)]
ROPE_DEFAULTS = {"rope_type": "default", "rope_theta": 10000.0}
ROPE_BESIDE = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")  # or in an object of rope's
ROPE_KEYS = (*ROPE_BESIDE, "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor")
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
    def from_config(path: str | Path, role: Role | None = None) -> ModelSpec:
        """Read `config.json` of a Hugging Face folder; the end tokens of its `generation_config.json` come first.

        Raises InputError naming the file and the field, also where the folder's model cannot be that of `role`.
        """
        file, generation = Path(path) / "config.json", Path(path) / "generation_config.json"
        if not is_listed(file):
            raise InputError(f"{file} is missing: {path} is no Hugging Face model folder; give its path")
        raw, said = (_read(source) if is_listed(source) else {} for source in (file, generation))
        ends = said.get("eos_token_id")
        return _from_config_dict(raw if ends is None else raw | {"eos_token_id": ends}, str(file), role)

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
    """What is read of config.json, with the defaults of its family."""

    num_hidden_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    hidden_size: Size
    num_attention_heads: Size
    intermediate_size: Size
    vocab_size: Size
    max_position_embeddings: Size
    tie_word_embeddings: bool
    rms_norm_eps: Annotated[float, Field(gt=0, le=1)]
    num_key_value_heads: Size | None
    bos_token_id: int | None
    head_dim: Size | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Size | None = None
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    original_max_position_embeddings: Size | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    architectures: list[str] | None = None


READ = _ConfigJson.model_fields.keys() | {"model_type", "eos_token_id"}


def _from_config_dict(raw: dict, where: str, role: Role | None) -> ModelSpec:
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise InputError(f"{where}: model_type {kind!r} is not supported; use one of {', '.join(ARCHITECTURES)}")
    own = DEFAULTS[kind]
    form = parse_json(_ConfigJson, own | {key: raw[key] for key in raw if raw[key] is not None or key in own}, where)
    _check_keys(raw, kind, where)
    if role is not None:
        _check_role(form, kind, role, where)
    heads, context, window = form.num_attention_heads, form.max_position_embeddings, _sliding_window(form, kind, where)
    kv_heads, head_dim = form.num_key_value_heads or heads, form.head_dim or form.hidden_size // heads
    if heads % kv_heads:
        said = f"num_key_value_heads={kv_heads}{'' if 'num_key_value_heads' in raw else f', the default of {kind},'}"
        raise InputError(f"{where}: num_attention_heads={heads}: {said} must divide it")
    if head_dim < 1 or kind == "llama" and form.hidden_size % heads:
        raise InputError(f"{where}: num_attention_heads={heads} must divide hidden_size={form.hidden_size}")
    if head_dim % 2:
        raise InputError(f"{where}: head_dim={head_dim} is odd, rotary embeddings need pairs; give an even one")
    theta, scaling = _rope(form, raw, kind, where)
    ends = raw.get("eos_token_id", own["eos_token_id"] if (own["eos_token_id"] or 0) < form.vocab_size else None)
    ends = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    if wrong := [token for token in ends if type(token) is not int or not 0 <= token < form.vocab_size]:
        ids = f"an id in [0, {form.vocab_size})"
        raise InputError(f"{where}, generation_config.json: eos_token_id {wrong[0]!r:.40} is not {ids}")
    biased = kind in BIASED and form.attention_bias
    return ModelSpec(
        architecture=kind,
        layers=form.num_hidden_layers,
        hidden=form.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=form.intermediate_size,
        vocab=form.vocab_size,
        context=min(context, window or context),
        tied_embeddings=form.tie_word_embeddings,
        qkv_bias=kind == "qwen2" or biased,
        proj_bias=biased,
        qk_norm=kind == "qwen3",
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=form.rms_norm_eps,
        sliding_window=window is not None and window < context,
        bos_token_id=form.bos_token_id,
        eos_token_ids=ends,
    )


def _check_keys(raw: dict, kind: str, where: str) -> None:
    """Every key is read, has no effect, or has the one value that is implemented."""
    only = IMPLEMENTED if kind in (*BIASED, "qwen2") else IMPLEMENTED | {"attention_bias": False}
    for key, value in raw.items():
        told = f"{where}: {key}={shorten(json.dumps(value), 60)}"
        if value is None and kind in NOT_NULL.get(key, ()):
            raise InputError(f"{told} stands for nothing in a {kind} model; give a value, or remove it")
        if key in only and value not in (only[key], None):  # qwen2 has its biases whatever the key says
            raise InputError(f"{told} is not supported; only {json.dumps(only[key])} is")
        if value is not None and not (key in READ or key in only or key in WITHOUT_EFFECT or key.startswith("_")):
            raise InputError(f"{told}: this key is not known; remove it if a {kind} model is the same without it")


def _check_role(form: _ConfigJson, kind: str, role: Role, where: str) -> None:
    """`architectures` must be of models that have the role's head."""
    heads = ["ForSequenceClassification"] if role.scalar_head else ["ForCausalLM"]
    usable = [ARCHITECTURES[kind] + head for head in (*heads, *["ForCausalLM"] * role.fresh_head)]
    given = form.architectures or []
    if given and not set(given) & set(usable):
        trained = ", as TRL's RewardTrainer saves" if role == "reward" else ""
        told = f"architectures {shorten(', '.join(given), 100)} cannot be {role}.path"
        raise InputError(f"{where}: {told}; use a {' or '.join(usable)}{trained}")


def _sliding_window(form: _ConfigJson, kind: str, where: str) -> int | None:
    """Tokens that some layer looks back on; None: all layers look on all."""
    types, layers, qwen = form.layer_types or [], form.num_hidden_layers, kind.startswith("qwen")
    window = None if kind == "llama" or qwen and not form.use_sliding_window else form.sliding_window
    if types and len(types) != layers or "sliding_attention" in types and not (qwen and window):
        told = f"layer_types {shorten(json.dumps(types), 60)}, with {layers} layers and window {window}"
        raise InputError(f"{where}: a {kind} model cannot have {told}; remove it, or give it a value for each layer")
    full = "sliding_attention" not in types if types else form.max_window_layers >= layers
    return None if qwen and full else window


def _number(rope: dict, name: str, where: str) -> float:
    value = rope[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_REAL:
        raise InputError(f"{where} has {name} {value!r:.40}; a number in (0, {MOST_REAL:g}] is needed")
    return float(value)


def _say_once(one: dict, other: dict, there: str, where: str) -> None:
    """Raise InputError where two statements about the rotary embedding differ, the `other` one `there`."""
    for key in sorted(one.keys() & other.keys()):
        if one[key] != other[key]:
            both = f"{shorten(repr(one[key]), 60)} and, {there}, {shorten(repr(other[key]), 60)}"
            raise InputError(f"{where}: {key} is {both}; remove the wrong one")


def _rope(form: _ConfigJson, raw: dict, kind: str, where: str) -> tuple[float, RopeScaling | None]:
    """theta and scaling, which config.json may say in one or two objects and beside them."""
    beside = {key: raw[key] for key in ROPE_BESIDE if raw.get(key) is not None}
    said = []
    for name in ("rope_scaling", "rope_parameters"):
        rope = getattr(form, name) or {}
        if unknown := [key for key in rope if key not in ROPE_KEYS and rope[key] is not None]:
            raise InputError(f"{where}: {name} has {unknown[0]!r:.40}, which is not known; {', '.join(ROPE_KEYS)} are")
        old = {"rope_type": rope["type"]} if "type" in rope else {}
        _say_once(beside | old, rope, f"in {name}", where)
        if rope:
            said.append(dict.fromkeys(ROPE_KEYS) | ROPE_DEFAULTS | beside | old | rope | {"type": None})
    _say_once(said[0], said[-1], "in rope_parameters beside rope_scaling", where) if said else None
    rope = said[0] if said else dict.fromkeys(ROPE_KEYS) | ROPE_DEFAULTS | beside
    if rope["partial_rotary_factor"] not in (None, only := IMPLEMENTED["partial_rotary_factor"]):
        wrong = f"partial_rotary_factor={rope['partial_rotary_factor']!r:.40}"
        raise InputError(f"{where}: {wrong} is not supported; only {only} is")
    if rope["original_max_position_embeddings"] is None:
        rope["original_max_position_embeddings"] = form.max_position_embeddings
    return _number(rope, "rope_theta", where), _rope_scaling(rope, kind, where)


def _rope_scaling(rope: dict, family: str, where: str) -> RopeScaling | None:
    kind = rope["rope_type"]
    number = partial(_number, rope, where=f"{where}: rope scaling {kind!r}")
    if kind == "default":
        return None
    if kind == "linear" and family != "phi3":
        return RopeScaling("linear", number("factor"))
    if kind == "llama3" and family != "phi3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        before = number("original_max_position_embeddings")
        if not low < high or before != int(before):
            told = f"low_freq_factor {low:g}, high_freq_factor {high:g} and {before:g} original tokens"
            raise InputError(f"{where}: rope scaling 'llama3' has {told}; low < high and a whole number are needed")
        return RopeScaling("llama3", number("factor"), low, high, int(before))
    kinds = "default is" if family == "phi3" else "default, linear and llama3 are"
    raise InputError(f"{where}: rope scaling {kind!r:.40} is not supported; {kinds}")


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
    prefill_launch_seconds: float = 0.0  # floor of one layer of a prefill, which the engine launches; 0: not measured
    half_rate_tokens: float = 0.0  # of a forward, at which its layers' products reach half of `flops`; 0: not measured
    decode_share: float = 1.0  # of `flops`, what products of the few rows of a decode step reach
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
