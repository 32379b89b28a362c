"""The configuration: YAML and dotted overrides, defaults that follow other keys, refusals that help."""

from itertools import product
from pathlib import Path

import pytest
from testkit.config_file import MINIMAL, load
from testkit.paths import ROOT

from rlhfuse.base.errors import InputError
from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.config.load import dump_config, load_config
from rlhfuse.config.rules import idle_settings


def test_defaults_follow_other_keys(tmp_path):
    config = load(tmp_path, overrides=["parallel.generation=d2t1p1"])
    assert config.actor.tokenizer == config.reference.path == "models/a"
    assert config.critic.path == "models/r"
    assert config.parallel.inference == config.parallel.critic_inference == "d2t1p1"
    assert config.samples_per_iteration == 64 and config.threshold() is None
    assert config.trainer.resume == "never"
    assert load(tmp_path, overrides=["reward.path=''", "reward.function=m:f"]).critic.path == "models/a"


def test_overrides_win_over_the_file(tmp_path):
    text = MINIMAL + "rollout: {samples_per_prompt: 2}\nfusion: {threshold: 5}\n"
    config = load(tmp_path, text, ["rollout.samples_per_prompt=8", "actor.optim.lr=1e-3", "data.train_files=[a,b]"])
    assert config.rollout.samples_per_prompt == 8 and config.actor.optim.lr == 1e-3
    assert config.critic.optim.lr == 1e-5 and config.data.train_files == ("a", "b")
    assert config.threshold() == 5 and load(tmp_path, dump_config(config)) == config


KEYS, OLD_NUMBERS = ("seed", "output_dir"), ("010", "-0_10", "12:30", "1:30:00", "1:30.5")  # octal, base 60
VAL = "data.val_files=[held_out.jsonl]"
TOOLS = "rollout.multi_turn.enable=true rollout.multi_turn.function_tool_path=t.py"


@pytest.mark.parametrize(
    "overrides, place, estimator",
    [
        ("", "reward", "k1"),
        ("algorithm.name=rloo", "reward", "k1"),
        ("algorithm.name=grpo", "loss", "k3"),
        ("algorithm.name=grpo algorithm.kl_in=reward", "reward", "k1"),
        ("algorithm.name=grpo algorithm.kl_estimator=k2", "loss", "k2"),
        ("algorithm.kl_in=loss", "loss", "k3"),
        ("algorithm.kl_estimator=k3", "reward", "k3"),
        ("algorithm.name=reinforce_plus_plus_baseline", "loss", "k3"),
    ],
)
def test_the_kl_has_its_place_and_estimator(tmp_path, overrides, place, estimator):
    algorithm = load(tmp_path, overrides=overrides).algorithm
    assert (algorithm.kl_in, algorithm.kl_estimator) == (place, estimator)


def test_a_schedule_with_an_end_ends_with_the_run(tmp_path):
    cosine = ["trainer.iterations=20", "actor.optim.lr_scheduler_type=cosine", "critic.warmup_iterations=5"]
    config = load(tmp_path, overrides=[*cosine, "critic.optim.lr_warmup_ratio=0.1"])
    assert (config.actor.optim.lr_decay_iterations, config.critic.optim.lr_decay_iterations) == (15, 20)
    longer = load(tmp_path, dump_config(config), ["trainer.iterations=40"])
    assert longer.actor == config.actor and longer.critic == config.critic
    assert load(tmp_path, overrides=["algorithm.name=grpo", *cosine]).actor.optim.lr_decay_iterations == 20
    assert load(tmp_path).actor.optim.lr_decay_iterations == 0


@pytest.mark.parametrize(
    "overrides, message",
    [
        ("algorithm.clip_epsilon=3", "did you mean algorithm.clip_eps"),
        ("trainer.iterations", "not of the form key=value"),
        ("trainer.iterations=0", "trainer.iterations=0 trains nothing: data.val_files is empty; give a file"),
        ("trainer.eval_every=2", "trainer.eval_every=2: data.val_files is empty"),
        ("trainer.eval_before_train=true", "trainer.eval_before_train=true: data.val_files is empty"),
        (f"{VAL} trainer.keep_best=true", "trainer.keep_best=true goes by the held-out score; set trainer.eval_every"),
        (f"{VAL} eval.temperature=0.0001", "eval.temperature=0.0001 must be 0 .greedy. or at least 0.001"),
        (f"{VAL} eval.temperature=0 eval.samples_per_prompt=2", "gives equal responses"),
        (
            f"{VAL} actor.optim.name=sgd trainer.keep_best=true trainer.eval_every=1",
            "actor.optim.name=sgd has no checkpoints",
        ),
        ("fusion.threshold=65", "65 > 64 samples of one iteration"),
        ("fusion.threshold=²", "must be auto or a number of samples"),
        ("trainer.seed=${", r"argument 'trainer.seed=\$\{' cannot be read"),
        (["trainer.seed=" + "[" * 100_000], r"argument 'trainer.seed=\[\[.* is nested more than 100 deep"),
        (["trainer.seed=" + "[" * 90 + "]" * 90], r"argument 'trainer.seed=\[\["),
        (["trainer.seed=" + "y" * (1 << 20)], r"trainer.seed='y{200}' must be a whole number"),
        (["x" * (1 << 20) + "=1"], "unknown key x{200}; did you mean"),
        ("a=b=c", "unknown key a; did you mean"),
        ("=x", "unknown key ; did you mean"),
        ("actor.ü=1", "unknown key actor.ü; did you mean actor.path"),
        ("trainer.seed=[1", r"argument 'trainer.seed=\[1' cannot be read"),
        ("trainer.seed=${nothing}", "trainer.seed: Interpolation key 'nothing' not found"),
        ("parallel.generation=d1p1", "parallel.generation=d1p1: layout 'd1p1' is not of the form d1t2p4"),
        ("actor.path=", "actor.path is not set"),
        ("actor.path=''", "actor.path is not set"),
        ("data.train_files=[]", "data.train_files is empty"),
        ("trainer=3", "trainer must be a mapping"),
        ("parallel=automatic", "parallel must be auto or a mapping, not 'automatic'"),
        ("parallel.generation=Auto", "parallel.generation=Auto: layout 'Auto' is not of the form d1t2p4"),
        ("parallel.sequence_parallel=maybe", "sequence_parallel='maybe' must be auto or true or false"),
        # settings that contradict each other
        ("algorithm.name=grpo rollout.samples_per_prompt=1", "rollout.samples_per_prompt=1 must be at least 2"),
        ("algorithm.name=rloo algorithm.gamma=0.9", "algorithm.gamma=0.9 must be 1"),
        ("algorithm.name=grpo critic.path=c", "grpo has no critic, but critic.path=c; drop critic.path"),
        ("algorithm.group_std=false", "group_std=false belongs to grpo"),
        ("algorithm.filter_groups.enable=true", "algorithm.name=ppo has no groups; use grpo or rloo"),
        (
            "algorithm.name=grpo algorithm.filter_groups.enable=true algorithm.filter_groups.max_num_gen_batches=1",
            "max_num_gen_batches=1 leaves no prompt to draw for others; use 2 or more",
        ),
        ("reference.path=none", "algorithm.kl_coef=0.05 must be 0"),
        ("algorithm.kl_target=6 algorithm.kl_coef=0", "cannot start at 0"),
        ("algorithm.kl_in=loss algorithm.kl_estimator=k1", "k1 in the loss has a gradient of mean 0"),
        ("algorithm.name=grpo algorithm.kl_estimator=k1", "use k3, or algorithm.kl_in=reward"),
        ("actor.optim.warmup_iterations=1 actor.optim.lr_warmup_ratio=0.1", "both say how long the warm-up is"),
        ("critic.optim.lr_scheduler_type=cosine critic.optim.warmup_iterations=10", "no iteration after the warm-up"),
        ("algorithm.dual_clip=0.5", "algorithm.dual_clip=0.5 must be above 1"),
        (
            "algorithm.loss_agg_mode=seq-mean-token-sum-norm",
            "needs algorithm.loss_scale_factor, e.g. max_response_tokens",
        ),
        (
            "algorithm.loss_scale_factor=40",
            "loss_scale_factor=40.0 belongs to seq-mean-token-sum-norm, not algorithm.loss_",
        ),
        (
            "algorithm.policy_loss.loss_mode=gspo algorithm.loss_agg_mode=token-sum",
            "gspo is always seq-mean-token-mean: algorithm.loss_agg_mode=token-sum must be that, or token-mean",
        ),
        ("algorithm.policy_loss.loss_mode=sapo algorithm.loss_agg_mode=seq-mean-token-sum", "sapo is always seq-mean"),
        ("algorithm.name=reinforce_plus_plus_baseline rollout.samples_per_prompt=1", "must be at least 2"),
        ("algorithm.name=reinforce_plus_plus_baseline algorithm.group_std=false", "group_std=false belongs to grpo"),
        ("algorithm.overlong_penalty=1", "belong together; set both or neither"),
        ("algorithm.overlong_penalty=1 algorithm.overlong_tokens=500", "overlong_tokens=500 > rollout"),
        ("reward.path=''", "reward.path is not set, nor is reward.function"),
        ("reward.function_weight=2", "weighs a function, but reward.function is not set"),
        ("reward.function=[m:f,m:g] reward.function_weights=[1]", "must be one for each of reward.function, 2"),
        ("reward.function=m:f reward.model_weight=0", "discards what reward.path gives; drop reward.path"),
        ("algorithm.score_scale=0", "discards every score"),
        (
            "reward.function=m:f trainer.hang_seconds=60 trainer.watchdog_seconds=30",
            "reward.timeout_seconds=60 must be below trainer.hang_seconds=60",
        ),
        ("fusion.search_seconds=700", "fusion.search_seconds=700 must be below trainer.hang_seconds=600"),
        ("trainer.watchdog_seconds=600", "trainer.watchdog_seconds=600 must be below trainer.hang_seconds=600"),
        ("fusion.least_threshold=65", "fusion.least_threshold=65 > 64 samples"),
        ("fusion.least_threshold=9 fusion.threshold=8", "fusion.threshold=8 < fusion.least_threshold=9"),
        ("trainer.resume=''", "must be auto, never or the path of a checkpoint"),
        ("trainer.wandb=offline trainer.wandb_project=''", "set it or trainer.wandb=off"),
        *((f"trainer.{key}={old}", f"YAML reads {old} as ") for key, old in product(KEYS, OLD_NUMBERS)),
        ("data.add_bos=true data.apply_chat_template=true", "data.add_bos=true is for plain text"),
        ("critic.optim.name=sgd trainer.save_every=1", "critic.optim.name=sgd has no checkpoints"),
        ("actor.optim.name=sgd trainer.resume=x", "actor.optim.name=sgd has no checkpoints"),
        ("critic.optim.name=sgd trainer.stop_after=1h", "critic.optim.name=sgd has no checkpoints"),
        (
            "trainer.stop_after=soon",
            "stop_after=soon: give days, hours, minutes and seconds above 0 as in 1d12h",
        ),
        ("trainer.stop_after=3h50", "trainer.stop_after=3h50: give days"),
        ("trainer.stop_after=50m3h", "trainer.stop_after=50m3h: give days"),
        ("trainer.stop_after=0h0m", "trainer.stop_after=0h0m: give days"),
        ("trainer.stop_after=-1h", "trainer.stop_after=-1h: give days"),
        ("trainer.stop_after=9999d", "trainer.stop_after=9999d: give days"),
        ("trainer.stop_after=90", "trainer.stop_after=90: give days"),
        ("rollout.multi_turn.enable=true", "function_tool_path is not set; give a file of tools"),
        (f"{TOOLS} rollout.multi_turn.format=xml", "format='xml' must be one of hermes, qwen3_coder, llama3_json"),
        (f"{TOOLS} rollout.multi_turn.max_assistant_turns=0", "max_assistant_turns=0 must be at least 1"),
        (f"{TOOLS} rollout.ignore_eos=true", "rollout.ignore_eos=true leaves no token that ends a turn"),
        (
            f"{TOOLS} rollout.multi_turn.timeout_seconds=600",
            "rollout.multi_turn.timeout_seconds=600 must be below trainer.hang_seconds=600",
        ),
        (
            "trainer.pace=p trainer.device=cuda",
            "trainer.device=cuda: trainer.pace=p waits in place of hardware; use cpu",
        ),
        ("trainer.pace=p fusion.profile=f", "fusion.profile=f: trainer.pace=p has all costs of the run; drop one"),
        ("trainer.pace=p", "rollout.draft_rows=auto: trainer.pace=p has no price of guesses; use 0"),
        (
            "trainer.pace=p rollout.draft_rows=0 parallel=auto",
            "parallel.generation=auto: trainer.pace=p has the costs of one choice alone; give a value",
        ),
        ("reward.function=get_reward", "get_reward is an environment's: set rollout.multi_turn.enable=true"),
    ],
)
def test_refusals_name_the_key(tmp_path, overrides, message):
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, overrides=overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides, scorers",
    [
        ("", "reference critic reward"),
        ("algorithm.name=grpo", "reference reward"),
        ("reference.path=none algorithm.kl_coef=0", "critic reward"),
        ("reward.path='' reward.function=m:f critic.path=c", "reference critic"),
        ("reward.function=m:f", "reference critic reward"),
        ("algorithm.name=rloo reference.path=None algorithm.kl_coef=0 reward.path='' reward.function=m:f", ""),
    ],
)
def test_a_run_has_the_models_that_it_needs(tmp_path, overrides, scorers):
    config = load(tmp_path, overrides=overrides)
    assert config.roles() == ("actor", *config.scorers()) and config.scorers() == tuple(scorers.split())
    assert config.trained() == tuple(role for role in ("actor", "critic") if role in config.roles())


@pytest.mark.parametrize("text", ["true", "True", "auto", "false"])
def test_whitening_is_a_choice_or_follows_the_algorithm(text):
    for name in ("ppo", "grpo", "rloo", "reinforce++", "reinforce_plus_plus_baseline"):
        expected = {"auto": name not in ("grpo", "rloo")}.get(text, text.lower() == "true")
        assert AlgorithmConfig(name=name, whiten_advantages=text).whitens == expected


def test_whitening_may_be_a_truth_of_yaml(tmp_path):
    config = load(tmp_path, MINIMAL + "algorithm: {whiten_advantages: false}\n")
    assert not config.algorithm.whitens and load(tmp_path, dump_config(config)) == config


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: [", "not valid YAML"),
        ("- 1\n", "must be a mapping"),
        ("actor: 3", "actor must be a mapping, not 3"),
        ("3", "not valid YAML: Invalid loaded object type: int"),
        ("", "actor.path is not set"),
        ("trainer: {seed: 1, seed: 2}", "not valid YAML: .*duplicate key seed"),
        ("actor: " + "[" * 500 + "]" * 500, "nested more than 100 deep; no key takes such a value"),
        ("actor: " + "[" * 100_000, "nested more than 100 deep"),  # more than libyaml's stack
        ("- " * 100_000, "nested more than 100 deep"),
        ('actor: {path: "' + "${" * 100_000 + '"}', "nested more than 100 deep"),
        ('actor: {path: "${actor.path}"}', r"run.yaml: actor.path: Recursive interpolation detected"),
        (b"actor: {path: \xff}", "run.yaml:1: not UTF-8 .byte 0xff at 14."),
        *((f"trainer: {{{key}: {old}}}", f"run.yaml: YAML reads {old} as ") for key, old in product(KEYS, OLD_NUMBERS)),
        ("rollout: {temprature: 1}", "run.yaml: unknown key rollout.temprature; did you mean rollout.temperature"),
    ],
)
def test_broken_files(tmp_path, text, message):
    (tmp_path / "run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message) as caught:
        load_config(tmp_path / "run.yaml")
    assert "\n" not in str(caught.value) and "run.yaml" in str(caught.value) or not text


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="cannot read .*: it is a folder; give the path of a YAML file"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "overrides, told",
    [
        ("", ""),
        ("parallel.inference=d2t1p1 algorithm.name=grpo", ""),
        (
            "fusion.intra_stage=false fusion.schedule=no.json",
            "fusion.schedule=no.json (fusion.intra_stage is not search)",
        ),
        ("fusion.inter_stage=false fusion.threshold=4", "fusion.threshold=4 (fusion.inter_stage=false)"),
        ("fusion.threshold=4 fusion.threshold_file=t", "fusion.threshold_file=t (fusion.threshold is given)"),
        ("reward.workers=2 reward.signature=trl", "reward.signature=trl (reward.function is not set)"),
        ("reward.workers=2", "reward.workers=2 (reward.function is not set)"),
        ("trainer.pace_stretch=2", "trainer.pace_stretch=2.0 (trainer.pace is not set)"),
        ("algorithm.name=grpo critic.optim.lr=1", "critic.optim.lr=1.0 (there is no critic)"),
        ("algorithm.name=rloo algorithm.lam=0.5", "algorithm.lam=0.5 (belongs to ppo)"),
        ("algorithm.name=grpo algorithm.value_clip_eps=0", "algorithm.value_clip_eps=0.0 (there is no critic)"),
        ("algorithm.kl_coef=0 algorithm.kl_horizon=5", "algorithm.kl_horizon=5 (algorithm.kl_target=0)"),
        ("algorithm.policy_loss.tau_neg=1", "algorithm.policy_loss.tau_neg=1.0 (belongs to sapo)"),
        ("algorithm.policy_loss.loss_mode=sapo algorithm.clip_eps_high=1", "clip_eps_high=1.0 (sapo does not clip)"),
        ("algorithm.policy_loss.loss_mode=cispo algorithm.dual_clip=2", "dual_clip=2.0 (cispo clips both sides)"),
        ("algorithm.policy_loss.loss_mode=gspo algorithm.dual_clip=2", ""),
        ("algorithm.kl_coef=0 algorithm.kl_estimator=k2", ""),
        ("algorithm.kl_coef=0 algorithm.kl_in=loss", ""),
        (
            "algorithm.name=grpo algorithm.kl_coef=0 algorithm.kl_in=reward algorithm.kl_estimator=k3",
            "without effect here: algorithm.kl_in=reward (algorithm.kl_coef=0)",
        ),
        (
            "reference.path=none algorithm.kl_coef=0 algorithm.kl_in=loss algorithm.kl_estimator=k2",
            "algorithm.kl_in=loss (reference.path=none), algorithm.kl_estimator=k2 (reference.path=none)",
        ),
        ("reference.path=none algorithm.kl_coef=0 algorithm.name=grpo", ""),
        (
            "algorithm.skip_zero_gradients=true",
            "algorithm.skip_zero_gradients=True (only grpo and rloo without whitening",
        ),
        (
            "algorithm.skip_zero_gradients=true algorithm.name=grpo",
            "(only grpo and rloo without whitening, and without KL",
        ),
        ("algorithm.skip_zero_gradients=true algorithm.name=grpo algorithm.kl_coef=0", ""),
        ("algorithm.skip_zero_gradients=true algorithm.name=rloo", ""),  # its KL is part of the rewards
        ("algorithm.skip_zero_gradients=true algorithm.name=rloo algorithm.entropy_coef=0.1", "have zero gradients"),
        ("algorithm.skip_zero_gradients=true algorithm.name=rloo algorithm.whiten_advantages=true", "zero gradients"),
        ("algorithm.skip_zero_gradients=true algorithm.name=reinforce++ algorithm.kl_coef=0", "have zero gradients"),
        ("rollout.ignore_eos=true rollout.min_tokens=3", "rollout.min_tokens=3 (nothing ends a response but"),
        ("rollout.ignore_eos=true rollout.min_tokens=3 rollout.stop=[x]", ""),
        ("trainer.device=cpu rollout.cuda_graphs=false", "rollout.cuda_graphs=False (trainer.device=cpu)"),
        ("actor.optim.name=sgd actor.optim.beta1=0.5", "actor.optim.beta1=0.5 (sgd has none)"),
        ("fusion.schedule=s fusion.search_seconds=3", "fusion.search_seconds=3.0 (fusion.schedule is given)"),
        ("trainer.wandb_project=mine", "trainer.wandb_project=mine (trainer.wandb=off)"),
        (
            "reference.path=none algorithm.kl_coef=0 parallel.reference_inference=d1t2p1",
            "parallel.reference_inference=d1t2p1 (reference.path=none)",
        ),
        (
            "reward.path='' reward.function=m:f parallel.reward_inference=d1t2p1",
            "parallel.reward_inference=d1t2p1 (there is no reward model)",
        ),
        (
            "critic.optim.name=sgd critic.optim.eps=0.5 actor.optim.min_lr_ratio=0.1",
            "actor.optim.min_lr_ratio=0.1 (the rate is constant), critic.optim.eps=0.5 (sgd has none)",
        ),
        ("critic.optim.min_lr_ratio=0.1", "critic.optim.min_lr_ratio=0.1 (the rate is constant)"),
        ("trainer.keep_checkpoints=3", "trainer.keep_checkpoints=3 (trainer.save_every=0)"),
        (
            "rollout.multi_turn.format=llama3_json",
            "rollout.multi_turn.format=llama3_json (rollout.multi_turn.enable=false)",
        ),
        (f"{TOOLS} rollout.multi_turn.format=llama3_json", ""),
    ],
)
def test_a_setting_without_effect_is_named(tmp_path, overrides, told):
    config = load(tmp_path, overrides=overrides)
    line = idle_settings(config)
    assert told in line and bool(line) == bool(told) and "\n" not in line
    assert idle_settings(load(tmp_path, dump_config(config))) == line


def test_an_example_that_is_not_here_is_the_installed_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = load_config("examples/quickstart.yaml", ["trainer.output_dir=examples/mine"])
    assert Path(found.actor.path).samefile(ROOT / "examples/tiny/actor") and found.actor.tokenizer == found.actor.path
    assert Path(found.data.train_files[0]).samefile(ROOT / "examples/prompts/quickstart.jsonl")
    assert found.trainer.output_dir == "examples/mine", "what is nowhere stays as it is"
    (tmp_path / "examples/tiny/actor").mkdir(parents=True)
    assert load_config("examples/quickstart.yaml").actor.path == "examples/tiny/actor", "one's own comes first"
    with pytest.raises(InputError, match="examples/none.yaml does not exist"):
        load_config("examples/none.yaml")
