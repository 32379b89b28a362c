"""Layouts print and parse back, model specs count parameters."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 172,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
}


def spec_of(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return ModelSpec.from_config(folder)


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 16), st.none() | st.integers(0, 1000), st.integers(1, 4))
def test_layout_prints_and_parses_back(dp, tp, pp, first, chunks):
    ranks = None if first is None else (first, first + dp * tp * pp - 1)
    layout = ParallelLayout(dp, tp, pp, ranks, chunks if pp > 1 else 1)
    assert ParallelLayout.parse(str(layout)) == layout
    assert layout.stages == layout.pp * layout.chunks and layout.size == dp * tp * pp


def test_chunks_cut_a_pipeline():
    assert str(ParallelLayout.parse("d1t2p4v2@0-7")) == "d1t2p4v2@0-7" and str(ParallelLayout(1, 1, 2)) == "d1t1p2"
    stages = ParallelLayout.parse("d1t1p2v2").stage_layers(5)
    assert [list(layers) for layers in stages] == [[0, 1], [2], [3], [4]]


FORM = ("", "d1t1", "d0t1p1", "t1d1p1", "d1t1p1@3", "d1t1p1 x", "d01t1p1", "d1t1p1@0-0-0", "d1t1p2v0", "d1t1p2@0-1v2")


@pytest.mark.parametrize(
    "text, message",
    [
        *((text, "is not of the form") for text in FORM),
        ("d1t1p2:", r"is not of the form d1t2p4, .* or d1t2p4:9,9,8,6"),
        ("d2t2p1@0-2", r"dp\(2\) \* tp\(2\) \* pp\(1\) = 4 != 3 ranks"),
        ("d2t1p1v2", r"layout d2t1p1v2: chunks\(2\) cut a pipeline, but pp is 1; drop v2"),
        ("d1t1p4:9,9", r"layers of 2 stages, but it has 4; give one each"),
        ("d1t1p2v2:9,9", r"layers of 2 stages, but it has 4; give one each"),
        ("d1t1p2:5,0", r"a stage without layers"),
    ],
)
def test_layout_refuses_other_text(text, message):
    with pytest.raises(InputError, match=message):
        ParallelLayout.parse(text)


@pytest.mark.parametrize(
    "text, message",
    [
        ("d1t1p2:3,1", r"=d1t1p2:3,1: 4 layers in all stages != layers\(5\)"),
        ("d1t8p1", r"kv_heads\(4\) % tp\(8\) = 4"),
        ("d1t1p6", r"pp\(6\) > layers\(5\)"),
        ("d1t3p1", r"heads\(8\) % tp\(3\)"),
    ],
)
def test_layout_that_does_not_fit_the_model(tmp_path, text, message):
    with pytest.raises(InputError, match=f"actor_train.*{message}"):
        spec_of(tmp_path).check_layout(ParallelLayout.parse(text), "actor_train")
    spec_of(tmp_path).check_layout(ParallelLayout.parse("d1t4p5"), "actor_train")


@given(layers=st.integers(1, 100), pp=st.integers(1, 100))
def test_stage_layers_cover_the_model_evenly(layers, pp):
    stages = ParallelLayout(1, 1, pp).stage_layers(layers)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    sizes = [len(stage) for stage in stages]
    assert len(sizes) == pp and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_a_cut_is_part_of_the_layout():
    layout = ParallelLayout.parse("d1t2p4@0-7:9,9,8,6")
    assert str(layout) == "d1t2p4@0-7:9,9,8,6" and layout.cut == (9, 9, 8, 6)
    assert [len(stage) for stage in layout.stage_layers(32)] == [9, 9, 8, 6] and layout.stage_layers(32)[3][-1] == 31
    assert layout.with_cut((8, 8, 8, 8)).cut is None and str(layout.with_cut((2, 2, 2, 1))) == "d1t2p4@0-7"
    assert ParallelLayout.parse("d1t1p2v2:1,2,1,1").stage_layers(5)[1] == range(1, 3)


def test_model_spec_counts_the_parameters_of_stories260k(tmp_path):
    """260,032 is what the published checkpoint holds."""
    spec = spec_of(tmp_path)
    assert spec.parameters() == 260032
    assert spec.parameters(scalar_head=True) == 260032 + 64
    assert spec_of(tmp_path, tie_word_embeddings=False).parameters() == 260032 + 512 * 64
    assert spec.kv_bytes_per_token(4) == 2 * 5 * 4 * 8 * 4
    assert spec.eos_token_ids == (2,) and spec_of(tmp_path, eos_token_id=[2, 3]).eos_token_ids == (2, 3)


INF, LINEAR = float("inf"), {"rope_type": "linear", "factor": 2.0}
SIZES = "num_hidden_layers hidden_size num_attention_heads intermediate_size vocab_size max_position_embeddings".split()
SIZES += ["num_key_value_heads", "head_dim"]
TRUTHS = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
ROPE = ("rope_parameters", "rope_scaling")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; use one of llama"),
        ({"hidden_size": 0}, "hidden_size is 0; must be greater than or equal to 1"),
        ({"vocab_size": None}, "vocab_size is null; must be a valid integer"),
        *(
            ({key: bad}, f"config.json: {key} is ")
            for key in SIZES
            for bad in (0, -1, 1.5, "x", True, [4], 10**400, 2**40)
        ),
        *(({key: bad}, f"config.json: {key} is ") for key in TRUTHS for bad in (0, "no", [True])),
        *(({"rms_norm_eps": bad}, "config.json: rms_norm_eps is ") for bad in (None, "x", 0, -1e-6, 10**400, INF, 2)),
        *(({key: bad}, f"config.json: {key} is ") for key in ROPE for bad in (3, "linear", [1])),
        *(({"rope_theta": bad}, "config.json: rope_theta is ") for bad in (0, "x", INF)),
        *(({"rope_parameters": {"rope_theta": bad}}, "has rope_theta ") for bad in (0, "x", None, 10**400)),
        *(
            ({"rope_scaling": LINEAR | {"factor": bad}}, "'linear' has factor ")
            for bad in (0, True, INF, 10**400, None)
        ),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers is 10001; must be less than or equal to 10000"),
        ({"num_key_value_heads": 3}, "num_attention_heads=8: num_key_value_heads=3 must divide it"),
        ({"hidden_size": 4}, "num_attention_heads=8 must divide hidden_size=4"),
        ({"eos_token_id": 10**400}, "is not an id in"),
        ({"eos_token_id": "</s>"}, "eos_token_id '</s>' is not an id in"),
        ({"hidden_act": []}, "hidden_act=.. is not supported"),
        ({"model_type": ["llama"]}, "model_type .'llama'. is not supported"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported; only "silu" is'),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; only 1 is"),
        ({"rope_parameters": {"partial_rotary_factor": 0.75}}, "partial_rotary_factor=0.75"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config="),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "rope scaling 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "'llama3' has low_freq_factor None; a number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope scaling 'yarn'"),
    ],
)
def test_unsupported_models_are_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        spec_of(tmp_path, **changes)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_missing_and_broken_config(tmp_path, name):
    with pytest.raises(InputError, match="config.json is missing"):
        ModelSpec.from_config(tmp_path)
    spec_of(tmp_path)
    broken = {"{": "not valid JSON", "[]": "must be a JSON object, not list", "null": "must be a JSON object"}
    for text, message in (broken | {"[" * 100_000: "nested more than", "9" * 5001: "not valid JSON"}).items():
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=f"{tmp_path / name}.*{message}.*download the checkpoint again"):
            ModelSpec.from_config(tmp_path)
