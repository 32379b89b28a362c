"""The configuration: YAML and dotted overrides, defaults that follow other keys, refusals that help."""

import pytest

from rlhfuse.config import dump_config, load_config
from rlhfuse.errors import InputError

MINIMAL = "actor: {path: models/a}\nreward: {path: models/r}\ndata: {train_files: [p.jsonl]}\n"


def load(folder, text=MINIMAL, overrides=()):
    file = folder / "run.yaml"
    file.write_text(text)
    return load_config(file, overrides)


def test_defaults_follow_other_keys(tmp_path):
    config = load(tmp_path, overrides=["parallel.generation=d2t1p1"])
    assert config.actor.tokenizer == config.reference.path == "models/a"
    assert config.critic.path == "models/r"
    assert config.parallel.inference == config.parallel.critic_inference == "d2t1p1"
    assert config.samples_per_iteration == 64 and config.threshold() is None
    assert config.trainer.resume == "never"


def test_overrides_win_over_the_file(tmp_path):
    text = MINIMAL + "rollout: {samples_per_prompt: 2}\nfusion: {threshold: 5}\n"
    config = load(tmp_path, text, ["rollout.samples_per_prompt=8", "actor.optim.lr=1e-3", "data.train_files=[a,b]"])
    assert config.rollout.samples_per_prompt == 8 and config.actor.optim.lr == 1e-3
    assert config.critic.optim.lr == 1e-5 and config.data.train_files == ["a", "b"]
    assert config.threshold() == 5


def test_resolved_config_reads_back_equal(tmp_path):
    config = load(tmp_path, overrides=["trainer.output_dir=runs/x", "fusion.threshold=7"])
    assert load(tmp_path, dump_config(config)) == config


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["trainer.iteration=3"], "unknown key trainer.iteration; did you mean trainer.iterations"),
        (["algorithm.clip_epsilon=3"], "did you mean algorithm.clip_eps"),
        (["actor.optim.learning_rate=3"], "unknown key actor.optim.learning_rate"),
        (["trainer.iterations"], "not of the form key=value"),
        (["trainer.iterations=many"], "trainer.iterations"),
        (["trainer.iterations=0"], "trainer.iterations=0 must be at least 1"),
        (["rollout.temperature=0"], "must be above 0"),
        (["rollout.top_p=1.5"], r"must be in \(0, 1\]"),
        (["algorithm.gamma=2"], r"algorithm.gamma=2.0 must be in \[0, 1\]"),
        (["algorithm.kl_estimator=k4"], "must be one of k1, k2, k3"),
        (["trainer.dtype=float16"], "must be one of float32, bfloat16"),
        (["fusion.threshold=some"], "must be auto or a number of samples"),
        (["fusion.threshold=65"], "65 > 64 samples of one iteration"),
        (["actor.path="], "actor.path: Incompatible value"),
        (["actor.path=''"], "actor.path is not set"),
        (["data.train_files=[]"], "data.train_files is empty"),
        (["trainer=3"], "trainer must be a mapping"),
    ],
)
def test_refusals_name_the_key(tmp_path, overrides, message):
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, overrides=overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message", [("a: [", "not valid YAML"), ("- 1\n", "must be a mapping"), ("actor: 3", "actor")]
)
def test_broken_files(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load(tmp_path, text)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load_config(tmp_path / "none.yaml")


def test_key_of_the_file_is_named_with_the_file(tmp_path):
    with pytest.raises(InputError, match="run.yaml: unknown key rollout.temprature; did you mean rollout.temperature"):
        load(tmp_path, MINIMAL + "rollout: {temprature: 1}\n")
