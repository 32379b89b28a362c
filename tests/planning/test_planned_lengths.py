"""Lengths that plans and searches are for: what is assumed has the shape that is said, what is named is read."""

import json
import math
import statistics

import pytest
from testkit.four_ranks import config, drafted, run
from testkit.sim_helpers import long_tail, with_turns

from rlhfuse.base.errors import InputError
from rlhfuse.planning.planned_lengths import QUANTILES, PlannedLengths, assumed_lengths
from rlhfuse.planning.price import price_generation
from rlhfuse.simulator.lengths import SampleLengths


@pytest.mark.parametrize("response", [200, 1024, 30000])
def test_the_assumption_is_lognormal_with_a_tenth_as_median_and_the_longest_at_999_of_1000(response):
    lengths = assumed_lengths(64, response)
    marks = lengths.percentiles()
    assert set(lengths.prompt) == {64} and len(lengths) == QUANTILES
    assert (marks["p50"], marks["p999"], marks["max"]) == (response // 10, response, response)
    logs = [math.log(output) for output in lengths.output]
    assert statistics.fmean(logs) == pytest.approx(math.log(response / 10), abs=0.02)
    assert statistics.stdev(logs) == pytest.approx(math.log(10) / 3.0902, rel=0.02)
    halves = [sum(lengths.output[part::2]) for part in (0, 1)]
    assert max(halves) < 1.2 * min(halves), "in no order of length"
    blocks = [sum(lengths.output[at : at + 250]) for at in range(0, 1000, 250)]
    assert max(blocks) < 1.5 * min(blocks), blocks


@pytest.mark.parametrize("response", range(1, 40))
def test_short_responses_have_a_tail_too_and_at_least_a_token(response):
    lengths = assumed_lengths(0, response)
    assert min(lengths.output) >= 1 and max(lengths.output) == response
    assert lengths == assumed_lengths(0, response)


def lengths_of(made) -> PlannedLengths:
    return PlannedLengths.of(made.parallel.lengths, made.longest_sample)


def test_named_lengths_are_read_and_cut_to_the_run(tmp_path):
    file = tmp_path / "past.jsonl"
    file.write_text("".join(json.dumps({"response_length": n, "other": 3}) + "\n" for n in (5, 50, 5000)))
    made = config(parallel__lengths=str(file))
    planned = lengths_of(made)
    lengths = planned.samples
    assert lengths.output == (5, 50, made.rollout.max_response_tokens) and lengths.prompt == (128,) * 3
    assert f"3 samples of parallel.lengths={file}" in planned.told and "; 1 cut to this run's 256" in planned.told
    assert set(lengths_of(config(parallel__lengths=f"{file}:other")).samples.output) == {3}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"lengths/output": [7, 8], "lengths/prompt": [1, 2]}) + "\n")
    assert lengths_of(config(parallel__lengths=str(tmp_path))).samples.output == (7, 8)


def test_training_is_for_what_a_past_run_leaves_out_where_this_one_does(tmp_path):
    row = {"lengths/output": [7, 800], "lengths/prompt": [1, 2], "lengths/zero_gradient": [1, 0]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"lengths/output": [9], "lengths/prompt": [4]}) + "\n")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    source, longest = str(tmp_path), config().longest_sample
    planned, every = (PlannedLengths.of(source, longest, skips) for skips in (True, False))
    assert planned.samples == every.samples and len(every.samples) == 3
    assert planned.trained == (SampleLengths((1, 2), (7, 256), 1, spared=(True, False)),)
    assert planned.trained_shares == (1 / 2, 258 / 266) and every.trained_shares == (1, 1)
    assert every.trained == PlannedLengths.of("", longest, True).trained == ()
    assert PlannedLengths.seen(*planned.trained, longest, "a run").trained == planned.trained


def test_what_is_assumed_is_said():
    planned = lengths_of(config())
    assert planned.samples == assumed_lengths(128, 256) and not planned.known
    assert planned.told.startswith("lengths are assumed: responses lognormal with median 26 and p99.9 256 tokens,")


def test_lengths_that_cannot_be_read_are_refused_by_their_key(tmp_path):
    with pytest.raises(InputError, match="parallel.lengths=/nowhere.csv: /nowhere.csv does not exist"):
        lengths_of(config(parallel__lengths="/nowhere.csv"))


def test_pauses_of_a_past_run_are_in_the_plan(tmp_path):
    """Generation takes longer, and fewer instances hold what is unfinished."""
    past = with_turns(long_tail(64, longest=256), 0, seconds=0.1)
    row = {"lengths/prompt": past.prompt, "lengths/output": past.output}
    drafts = []
    for name, more in (("plain", {}), ("tools", {"lengths/turns": past.turns})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row | more))
        drafts.append(drafted(run(parallel__lengths=str(tmp_path / name))))
    plain, tools = drafts
    assert tools.generation.limits.active_share < plain.generation.limits.active_share == 1
    assert price_generation(tools).serial > price_generation(plain).serial + 0.1
