"""Layouts that are auto: the word for the whole group and for single rows, what is then searched, and refusals."""

import pytest
from testkit.config_file import MINIMAL, load

from rlhfuse.base.errors import InputError
from rlhfuse.config.auto_layouts import auto_layouts, refuse_auto, searched_keys
from rlhfuse.config.load import dump_config
from rlhfuse.config.rules import idle_settings

GIVEN = MINIMAL + "parallel: {generation: d4t1p1, reward_inference: d2t2p1, lengths: past.csv, headroom: 0.2}\n"
WORD = MINIMAL + "parallel: auto\n"
SCORERS = tuple(f"{role}_inference" for role in ("reference", "critic", "reward"))
ALL = ("generation", *SCORERS, "actor_train", "critic_train", "sequence_parallel")
FIXED = "parallel.generation=d4t1p1 parallel.sequence_parallel=false"


@pytest.mark.parametrize(
    "text, overrides, rows",
    [
        (MINIMAL, "", ()),
        (WORD, "", ALL),
        (MINIMAL, "parallel=auto", ALL),
        (GIVEN, "parallel=auto", ALL),  # instead of the file's
        (WORD, FIXED, ALL[1:-1]),
        (MINIMAL, f"parallel=auto {FIXED}", ALL[1:-1]),
        (GIVEN, "parallel.actor_train=auto", ("actor_train",)),
        (MINIMAL, "parallel.generation=auto", ALL[:4]),  # the scorers' follow it
        (MINIMAL, "parallel.sequence_parallel=auto", ("sequence_parallel",)),
    ],
)
def test_the_word_for_the_group_or_for_rows_says_what_is_searched(tmp_path, text, overrides, rows):
    config = load(tmp_path, text, overrides)
    keys = tuple(f"parallel.{row}" for row in rows)
    assert searched_keys(config) == (*keys, "fusion.microbatch_tokens")
    for cut in ("fusion.actor_microbatches=2", "fusion.microbatch_tokens=2048"):
        assert searched_keys(load(tmp_path, text, f"{overrides} {cut}")) == keys
    assert load(tmp_path, dump_config(config)) == config
    if text == GIVEN:
        assert (config.parallel.lengths, config.parallel.headroom) == ("past.csv", 0.2)


def test_tokens_or_a_number_of_microbatches_not_both(tmp_path):
    with pytest.raises(InputError, match="tokens=512 and fusion.actor_microbatches=4: .* one of them to auto"):
        load(tmp_path, MINIMAL, "fusion.microbatch_tokens=512 fusion.actor_microbatches=4")


def test_layouts_of_models_that_the_run_has_not_are_not_searched(tmp_path):
    config = load(tmp_path, MINIMAL, ["parallel=auto", "algorithm.name=grpo"])
    assert not [key for key in auto_layouts(config) if "critic" in key]
    assert idle_settings(config) == ""


def test_a_program_without_a_search_refuses_them(tmp_path):
    config = load(tmp_path, MINIMAL, ["parallel=auto"])
    with pytest.raises(InputError, match="parallel.generation=auto: it takes layouts; or give values, such as"):
        refuse_auto(searched_keys(config), "it takes layouts")
    refuse_auto((), "it takes layouts")


def test_what_the_search_reads_is_idle_without_it(tmp_path):
    given = "fusion.actor_microbatches=2"
    asked = ["parallel.lengths=past.csv", "parallel.headroom=0.2", "trainer.device=cuda", given]
    assert idle_settings(load(tmp_path, MINIMAL, asked)) == "", "the plan reads lengths whatever is auto"
    assert idle_settings(load(tmp_path, MINIMAL, ["parallel.lengths=past.csv", "parallel=auto"])) == ""
