"""Layouts that are auto: the word for the whole group and for single rows, what is then searched, and refusals."""

import pytest
from testkit.config_file import MINIMAL, load

from rlhfuse.base.errors import InputError
from rlhfuse.config.auto_layouts import auto_layouts, refuse_auto, searched_keys
from rlhfuse.config.load import dump_config
from rlhfuse.config.rules import idle_settings

ROWS = ("actor_train", "critic_train", "generation", "inference")
SCORERS = ("reference_inference", "reward_inference", "critic_inference")
GIVEN = MINIMAL + "parallel: {generation: d4t1p1, reward_inference: d2t2p1, lengths: past.csv, headroom: 0.2}\n"
WORD = [(MINIMAL + "parallel: auto\n", ""), (MINIMAL, "parallel=auto ")]  # in the file, or as an argument


@pytest.mark.parametrize("text, overrides", WORD)
def test_the_word_for_the_group_is_every_layout_and_sequence_parallel(tmp_path, text, overrides):
    config = load(tmp_path, text, overrides)
    assert {getattr(config.parallel, row) for row in (*ROWS, *SCORERS, "sequence_parallel")} == {"auto"}
    assert searched_keys(config)[-1] == "fusion.actor_microbatches" and "trainer.recompute" not in searched_keys(config)
    assert load(tmp_path, dump_config(config)) == config


def test_the_word_replaces_layouts_of_the_file_and_leaves_the_rest(tmp_path):
    config = load(tmp_path, GIVEN, ["parallel=auto"])
    assert config.parallel.generation == config.parallel.reward_inference == "auto"
    assert (config.parallel.lengths, config.parallel.headroom) == ("past.csv", 0.2)


@pytest.mark.parametrize("text, overrides", WORD)
def test_rows_after_the_word_stay_fixed(tmp_path, text, overrides):
    rows = "parallel.generation=d4t1p1 parallel.sequence_parallel=false fusion.actor_microbatches=2"
    config = load(tmp_path, text, overrides + rows)
    assert config.parallel.generation == "d4t1p1" and config.parallel.sequence_parallel is False
    assert set(searched_keys(config)) == {f"parallel.{row}" for row in ("actor_train", "critic_train", *SCORERS)}


def test_single_rows(tmp_path):
    config = load(tmp_path, GIVEN, ["parallel.actor_train=auto"])
    assert searched_keys(config) == ("parallel.actor_train", "fusion.actor_microbatches")
    assert config.parallel.critic_train == "d1t1p1", "defaults stay as they are"
    config = load(tmp_path, MINIMAL, ["parallel.generation=auto"])
    assert config.parallel.inference == config.parallel.critic_inference == "auto", "they follow generation"
    config = load(tmp_path, MINIMAL, ["parallel.sequence_parallel=auto"])
    assert searched_keys(config) == ("parallel.sequence_parallel", "fusion.actor_microbatches")
    config = load(tmp_path, MINIMAL, ["trainer.recompute=auto"])
    assert searched_keys(config) == ("trainer.recompute",), "bits stay, so micro-batches do"
    assert searched_keys(load(tmp_path)) == ()


def test_layouts_of_models_that_the_run_has_not_are_not_searched(tmp_path):
    config = load(tmp_path, MINIMAL, ["parallel=auto", "algorithm.name=grpo"])
    assert not [key for key in auto_layouts(config) if "critic" in key]
    assert idle_settings(config) == ""


def test_a_program_without_a_search_refuses_them(tmp_path):
    config = load(tmp_path, MINIMAL, ["parallel=auto"])
    with pytest.raises(InputError, match="parallel.generation=auto: it takes layouts; or give values, such as"):
        refuse_auto(config, "it takes layouts")
    refuse_auto(load(tmp_path), "it takes layouts")


def test_what_the_search_reads_is_idle_without_it(tmp_path):
    asked = ["parallel.lengths=past.csv", "parallel.headroom=0.2", "trainer.device=cuda"]
    assert idle_settings(load(tmp_path, MINIMAL, asked)) == "", "the plan reads lengths whatever is auto"
    told = idle_settings(load(tmp_path, MINIMAL, [*asked, "trainer.offload_optimizer=false"]))
    assert "parallel.headroom=0.2 (neither layouts nor trainer.offload_optimizer" in told
    assert idle_settings(load(tmp_path, MINIMAL, ["parallel.lengths=past.csv", "parallel=auto"])) == ""
