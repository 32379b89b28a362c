"""Every value of the configuration, found by reflection: wrong types, and numbers at and beyond their limits.

A new key without a row in LIMITS fails here.
"""

import math
from datetime import date
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from testkit.config_file import MINIMAL, load

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import LARGEST
from rlhfuse.base.sample_ids import COPY_BITS, ITERATION_BITS, PROMPT_BITS
from rlhfuse.config.load import dump_config, validate
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO, LARGEST_REAL, seconds_of

OR_AUTO = {key: 1 for key, value, field in RunConfig().leaves() if value == AUTO and field.annotation is int}
LEAVES = {key: value for key, value, _ in RunConfig().leaves()} | OR_AUTO
NUMBERS = {key: value for key, value in LEAVES.items() if type(value) in (int, float)}
WRONG = {  # what a leaf of a kind refuses, as it stands in a file
    bool: ("2", "0", "perhaps", "null", "[true]", "{a: true}", "1.5", "???"),
    int: ("many", "true", "null", "[1]", "{a: 1}", "1.5", "2024-01-01", "'???'", ".nan"),
    float: ("many", "true", "null", "[1.0]", "{a: 1}", "2024-01-01", "'???'"),
    str: ("[a]", "{a: b}", "null", "'???'"),
    dict: ("many", "3", "[1]", "null", "true"),
    tuple: ("a.jsonl", "3", "[1]", "[[a]]", "{a: b}", "null", "['???']"),
}
CASES = [
    (key, WRONG[type(value)][number % len(WRONG[type(value)])]) for number, (key, value) in enumerate(LEAVES.items())
]
IDS = ("2", "[a]", "[-1]", "[true]", "[1.5]", "[[1]]", "{a: 1}", "null")  # no list of ids
CASES = [case for case in CASES if case[0] != "rollout.stop_token_ids"]
CASES += [("rollout.stop_token_ids", wrong) for wrong in IDS]
CASES += [("data.train_files", wrong) for wrong in WRONG[tuple]] + [("trainer.export", wrong) for wrong in WRONG[bool]]


def nested(key: str, value: Any) -> Any:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def refused(key: str, value: Any) -> str:
    with pytest.raises(InputError) as caught:
        validate(nested(key, value), "a file")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("key, wrong", CASES)
def test_a_wrong_type_is_refused_by_its_key(tmp_path, key, wrong):
    with pytest.raises(InputError) as caught:
        load(tmp_path, "\n".join(f"{'  ' * depth}{name}:" for depth, name in enumerate(key.split("."))) + f" {wrong}\n")
    assert f"run.yaml: {key}" in str(caught.value) and "\n" not in str(caught.value)


PLAIN = (None, True, 0, -1, 2.5, 10**40, 10**400, math.nan, math.inf, "", "x", "${x}", "1e400", b"x", date(2024, 1, 1))
NESTED = ([], {}, [1], ["x"], [None], [[]], [[1]], [{}], {"x": 1}, {1: 2}, {"x": {"y": []}}, (1, 2))


@pytest.mark.parametrize("key", [*LEAVES, *sorted({key.rpartition(".")[0] for key in LEAVES}), "rollout.0", ""])
def test_any_value_at_any_key_is_taken_or_refused_in_one_line(tmp_path, key):
    for value in PLAIN + NESTED:
        for read in (lambda raw: validate(raw, "a file"), lambda raw: load(tmp_path, yaml.dump(raw))):
            try:
                assert isinstance(read(nested(key, value)), RunConfig), value
            except InputError as error:
                assert "\n" not in str(error), value


CHOICES = {k: get_args(one.annotation) for k, _, one in RunConfig().leaves() if get_origin(one.annotation) is Literal}


@pytest.mark.parametrize("key", CHOICES)
def test_a_choice_is_one_of_its_names(key):
    for name in (*CHOICES[key], *(["True"] if "true" in CHOICES[key] else [])):
        validate(nested(key, name), "a file")
    assert refused(key, "many") == f"{key}='many' must be one of {', '.join(CHOICES[key])}"


# numbers --------------------------------------------------------------------------------------------------------

TINY = 5e-324  # the smallest float above 0
# the least and the largest that are taken, the nearest below and above that are not
AT_LEAST_0, AT_LEAST_1 = ((0, LARGEST), (-1, LARGEST + 1)), ((1, LARGEST), (0, LARGEST + 1))
REAL_0 = ((0.0, LARGEST_REAL), (-TINY, 3.1e38))
REAL = ((-LARGEST_REAL, LARGEST_REAL), (-3.1e38, 3.1e38))
ABOVE_0 = ((TINY, LARGEST_REAL), (0.0, 3.1e38))
SHARE = ((0.0, 1.0), (-TINY, 1.0000001))
TOP_P = ((TINY, 1.0), (0.0, 1.0000001))
TEMPERATURE = ((0.001, 1000.0), (0.0009999, 1000.1))
DECAY = ((0.0, 0.9999999), (-TINY, 1.0))
SECONDS = ((TINY, 1e7), (0.0, 10000001.0))
PROCESSES = ((1, 1024), (0, 1025))
PROMPTS, COPIES = (((1, 2**bits), (0, 2**bits + 1)) for bits in (PROMPT_BITS, COPY_BITS))
KEYS = {  # by the limits that they have
    "actor.optim critic.optim": {
        AT_LEAST_0: "warmup_iterations lr_decay_iterations",
        REAL_0: "lr weight_decay clip_grad",
        ABOVE_0: "eps",
        SHARE: "lr_warmup_ratio min_lr_ratio",
        DECAY: "beta1 beta2",
    },
    "critic": {AT_LEAST_0: "warmup_iterations"},
    "algorithm": {
        AT_LEAST_0: "overlong_tokens",
        AT_LEAST_1: "kl_horizon minibatches epochs",
        REAL_0: "kl_coef kl_target clip_eps_high dual_clip value_clip_eps value_loss_coef score_clip "
        "missing_eos_penalty length_penalty overlong_penalty loss_scale_factor",
        REAL: "entropy_coef score_scale",
        SHARE: "gamma lam top_entropy_quantile",
        TOP_P: "clip_eps",
    },
    "algorithm.filter_groups": {AT_LEAST_1: "max_num_gen_batches max_inflight_gen_batches"},
    "algorithm.policy_loss": {TEMPERATURE: "tau_pos tau_neg"},
    "rollout": {
        AT_LEAST_0: "min_tokens top_k draft_rows kv_blocks_per_instance",
        AT_LEAST_1: "max_response_tokens block_tokens max_sequences_per_instance max_batched_tokens",
        PROMPTS: "prompts_per_iteration",
        COPIES: "samples_per_prompt",
        TOP_P: "top_p",
        TEMPERATURE: "temperature",
    },
    "rollout.multi_turn": {
        AT_LEAST_1: "max_assistant_turns max_parallel_calls max_tool_response_length",
        SECONDS: "timeout_seconds",
        PROCESSES: "workers",
    },
    "eval": {
        AT_LEAST_0: "max_response_tokens",
        COPIES: "samples_per_prompt",
        TOP_P: "top_p",
        ((0.0, 1000.0), (-TINY, 1000.1)): "temperature",
    },
    "fusion": {
        AT_LEAST_0: "least_threshold bs_max",
        AT_LEAST_1: "microbatch_tokens actor_microbatches bucket_mib",
        SECONDS: "search_seconds",
    },
    "trainer": {
        AT_LEAST_0: "eval_every save_every sample_texts trace_iterations",
        AT_LEAST_1: "keep_checkpoints",
        REAL_0: "memory_limit_gb host_memory_gb",
        SECONDS: "watchdog_seconds hang_seconds grace_seconds pace_stretch",
        PROCESSES: "threads_per_rank",
        ((0, 2**ITERATION_BITS), (-1, 2**ITERATION_BITS + 1)): "iterations",
        ((0, 2**63 - 1), (-1, 2**63)): "seed",
    },
    "reward": {REAL: "model_weight function_weight", SECONDS: "timeout_seconds", PROCESSES: "workers"},
    "data": {AT_LEAST_1: "max_prompt_tokens"},
    "parallel": {DECAY: "headroom"},
}
LIMITS = {
    f"{group}.{name}": limits
    for groups, rows in KEYS.items()
    for group in groups.split()
    for limits, names in rows.items()
    for name in names.split()
}


def test_every_number_has_its_limits_here():
    assert NUMBERS.keys() == LIMITS.keys()


@pytest.mark.parametrize("key", sorted(LIMITS))
def test_a_number_at_its_limits_is_taken_and_beyond_them_refused(key):
    taken, beyond = LIMITS[key]
    beyond += (-(10**30), 10**30) if type(NUMBERS[key]) is int else (-1e300, 1e300, math.nan, math.inf, -math.inf)
    for value in taken:
        validate(nested(key, value), "a file")
    for value in beyond:
        assert refused(key, value).startswith(f"{key}={value} must be "), value


def test_a_number_may_be_left_to_be_chosen(tmp_path):
    rest = {"data.max_prompt_tokens", "algorithm.minibatches", "fusion.actor_microbatches", "fusion.microbatch_tokens"}
    assert OR_AUTO.keys() == rest | {"rollout.block_tokens", "rollout.draft_rows"}
    for key in OR_AUTO:
        config = validate(nested(key, 7), "a file")
        assert validate(nested(key, AUTO), "a file") == RunConfig() != config
        assert refused(key, "many") == f"a file: {key}='many' must be auto or a whole number"
        dumped = dump_config(load(tmp_path, overrides=f"{key}=7"))
        assert load(tmp_path, dumped, f"{key}=auto") == load(tmp_path, dumped).with_(**nested(key, AUTO))


@pytest.mark.parametrize("key", sorted(LEAVES))
def test_a_misspelt_key_is_told_its_name(key):
    assert refused(f"{key}_", 1) == f"a file: unknown key {key}_; did you mean {key}?"


def test_an_argument_may_mend_a_range_but_no_type(tmp_path):
    given, asked = MINIMAL + "trainer: {iterations: %s}\n", "trainer.iterations=3"
    assert load(tmp_path, given % 0, asked).trainer.iterations == 3
    with pytest.raises(InputError, match="run.yaml: trainer.iterations='many' must be a whole number"):
        load(tmp_path, given % "many", asked)


def test_a_config_is_frozen_and_its_changes_are_validated():
    config = RunConfig().with_(trainer={"seed": 3}, critic={"optim": {"lr": 0.5}})
    assert (config.trainer.seed, config.critic.optim.lr, config.critic.optim.beta2) == (3, 0.5, 0.95)
    assert RunConfig().trainer.seed == 1 and RunConfig().critic.optim.lr == 1e-5
    for broken in ({"seed": -1}, {"seed": True}, {"sed": 1}, {"dtype": "float16"}):
        with pytest.raises(ValueError):
            config.with_(trainer=broken)
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.seed = 2


@pytest.mark.parametrize("text, order", [("true", "search"), ("False", "serial"), ("time_sharing", "time_sharing")])
def test_a_truth_says_whether_training_is_searched(text, order):
    assert RunConfig.model_validate({"fusion": {"intra_stage": text}}).fusion.intra_stage == order
    assert RunConfig().with_(fusion={"intra_stage": order == "search"}).fusion.alternates


PATHS = sorted(key for key in LEAVES if key.endswith(("path", "output_dir", "resume", "tokenizer")))


@pytest.mark.parametrize("key", PATHS)
def test_a_name_that_no_file_can_have_is_refused(key):
    assert "no file has such a name" in refused(key, "x" * 300)
    for name in ("a\0b", "half \ud83d", "y" * 5000, "a/" * 3000):
        assert len(refused(key, name)) < 500
    validate(nested(key, "a b ü/" * 20), "a file")


@pytest.mark.parametrize(
    "text, seconds", [("", math.inf), ("3h50m", 13800), ("1d12h", 129600), ("90s", 90), ("1d2h3m4s", 93784)]
)
def test_a_duration_has_days_hours_minutes_and_seconds(text, seconds):
    assert seconds_of(text) == seconds
    assert validate({"trainer": {"stop_after": text}}, "a file").trainer.stop_after == text
