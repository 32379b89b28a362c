"""config.json of every family, key by key and value by value: read as transformers reads it, or refused."""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.base.errors import InputError
from rlhfuse.config.config_json import ARCHITECTURES
from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.hf_names import LM_HEAD, expected_tensors
from rlhfuse.models.layers.rotation import rotary_frequencies

LEFT_OUT = object()
SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=128, bos_token_id=1, eos_token_id=2)
SIZES |= dict(pad_token_id=0, sliding_window=None)
LLAMA3 = '"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0'
ROPES = """null, {}, {"rope_type": "default"}, {"rope_theta": 5e5}, {"factor": 2.0}, {"rope_type": "linear"},
{"rope_type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
{"rope_type": "linear", "factor": 4.0, "rope_theta": 777}, {"type": "linear", "factor": 3},
{"type": "linear", "rope_type": "linear", "factor": 3}, {"type": "linear", "rope_type": "default", "factor": 3},
{"rope_type": null, "factor": 2}, {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
{"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 1.0}, {"rope_type": "yarn", "factor": 2.0},
{"rope_type": "linear", "factor": 4.0, "mrope_section": [1, 1, 2]}, {LLAMA3, "low_freq_factor": 1.0},
{LLAMA3, "low_freq_factor": 1.0, "original_max_position_embeddings": 32}, {LLAMA3, "low_freq_factor": 4.0},
{LLAMA3, "low_freq_factor": 1.0, "original_max_position_embeddings": 32, "rope_theta": 1e6},
{"rope_type": "dynamic", "factor": 2.0}, {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}"""
ROPES = ROPES.replace("LLAMA3", LLAMA3)
TABLE = f"""num_key_value_heads: null, 1, 2, 3, 4, 8
head_dim: null, 1, 2, 3, 6, 7, 16, 128
hidden_size: null, 30, 33, 34, 64
num_attention_heads: null, 2, 3, 5, 32, 64
intermediate_size: null, 1, 33
num_hidden_layers: null, 1, 3
vocab_size: null, 5, 130
max_position_embeddings: null, 1, 64
rms_norm_eps: null, 1e-6, 1e-5, 0.1
tie_word_embeddings: null, true, false
attention_bias: null, true, false
mlp_bias: null, true, false
hidden_act: null, "silu", "gelu", "relu"
eos_token_id: null, 3, [3, 4], -1
rope_theta: null, 777, 5e5, 5e9
rope_scaling: {ROPES}
rope_parameters: {ROPES}
partial_rotary_factor: null, 0.5, 1, 1.0
original_max_position_embeddings: 16, 64
use_sliding_window: null, true, false
sliding_window: null, 20, 4096
max_window_layers: 0, 1, 2, 28
layer_types: null, ["full_attention"], ["full_attention", "full_attention"], ["full_attention", "sliding_attention"]
is_causal: true, false
is_encoder_decoder: true, false
quantization_config: null, {{"quant_method": "awq", "bits": 4}}
attention_dropout: 0.0, 0.1
pretraining_tp: 1, 2
logit_scale: null, 2.0
per_layer_config: null, {{"0": {{"hidden_size": 64}}}}"""
LINES = [line.partition(": ") for line in TABLE.replace(",\n", ", ").splitlines()]
VALUES = {key: [LEFT_OUT, *json.loads(f"[{values}]")] for key, _, values in LINES}
SINGLE = [(kind, {key: value}) for kind in ARCHITECTURES for key in VALUES for value in VALUES[key]]


def of_transformers(folder):
    """(configuration, shapes of all tensors, rotary frequencies), or None where transformers refuses the folder."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        rotary = type(model.model.rotary_emb)(config)
    except Exception:  # of many kinds
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes[LM_HEAD]
    return config, shapes, rotary.inv_freq * rotary.attention_scaling


def windows(config):
    """Tokens that each layer looks back on, None for all."""
    window = getattr(config, "sliding_window", None)
    if config.model_type.startswith("qwen"):
        return [window if kind == "sliding_attention" else None for kind in config.layer_types]
    return [None if config.model_type == "llama" else window]


def check(folder, kind, changes):
    """Whether a folder with these changes is read; asserts that it is read as transformers does."""
    raw = {"model_type": kind, **SIZES, **changes}
    (folder / "config.json").write_text(json.dumps({key: raw[key] for key in raw if raw[key] is not LEFT_OUT}))
    try:
        spec = ModelSpec.from_config(folder)
    except InputError as error:
        assert "\n" not in str(error) and str(folder) in str(error)
        return False
    assert (theirs := of_transformers(folder)), "transformers refuses it"
    config, shapes, frequencies = theirs
    assert expected_tensors(spec, scalar_head=False) == shapes
    assert spec.parameters() == sum(math.prod(shape) for shape in shapes.values())
    assert (spec.heads, spec.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    torch.testing.assert_close(rotary_frequencies(spec), frequencies, rtol=1e-6, atol=0)
    assert (spec.norm_eps, spec.tied_embeddings) == (config.rms_norm_eps, config.tie_word_embeddings)
    assert spec.context == min(window or config.max_position_embeddings for window in [None, *windows(config)])
    assert config.hidden_act == "silu" and getattr(config, "is_causal", True) and not config.is_encoder_decoder
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    assert list(spec.eos_token_ids) == [end for end in ends if end is not None and end < spec.vocab]
    return True


def test_each_key_alone(tmp_path):
    """860 variants; most are read."""
    read = sum(check(tmp_path, *change) for change in SINGLE)
    assert (len(SINGLE), read) == (860, 588)


@examples(100)
@given(
    st.sampled_from(list(ARCHITECTURES)),
    st.dictionaries(st.sampled_from(list(VALUES)), st.integers(0, 99), min_size=2, max_size=4),
)
def test_several_keys_at_once(kind, places):
    with TemporaryDirectory() as folder:
        check(Path(folder), kind, {key: VALUES[key][place % len(VALUES[key])] for key, place in places.items()})
