"""Runs of two ranks whose samples call tools: fused is serial, a replay, and what a killed run goes on to."""

import json

import pytest
from testkit.runs_table import FUSED, SERIAL, assert_same_bits, begin_again, metrics_of
from testkit.tool_run import write_tool_run

from rlhfuse.base.json_values import read_json_lines
from rlhfuse.data.tool_journal import JournalEntry
from rlhfuse.monitor.samples import read_samples

HELD_OUT = "data.val_files=[{tools}/held_out.jsonl] trainer.eval_every=1 eval.temperature=0.9"
WORLD = "rollout.multi_turn.function_tool_path={tools}/world.py:World"
ON_ONE_INSTANCE = "parallel.generation=d1t2p1"
KINDS = {
    "fails": "rollout.multi_turn.on_tool_failure=fail",
    "of-a-world": f"{WORLD} reward.function=get_reward reward.signature=auto",
    "scored-as-text": "reward.function={tools}/rewards.py:text algorithm.name=rloo",
    "filtered": "algorithm.filter_groups.enable=true rollout.multi_turn.max_assistant_turns=2",
}


@pytest.fixture(scope="module")
def tool_runs(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    config, done = write_tool_run(folder), set()

    def start(name, *settings, again=False):
        if again or name not in done:
            words = [setting.replace("{tools}", str(folder)) for setting in settings]
            runs.start(f"tools-{name}", *words, config=config)
            done.add(name)
        return runs.folder / f"tools-{name}"

    start.folder = folder
    return start


def made(tool_runs):
    """Calls that were made, by whatever run."""
    return len((tool_runs.folder / "made").read_text().splitlines())


def journal_of(run):
    return [entry for file in sorted(run.glob("tool_calls.*.jsonl")) for entry in read_json_lines(JournalEntry, file)]


def test_fused_is_serial_and_a_replay_calls_nothing(tool_runs):
    fused = tool_runs("fused", f"{FUSED} {HELD_OUT} trainer.save_every=1")
    rows = metrics_of(fused)
    assert all(row["num_turns/max"] > 2 and row["fusion/migrated_samples"] for row in rows)
    assert all(row["tool_call_counts/max"] > 2 and row["agent_loop/tool_calls/max"] > 0 for row in rows)
    assert all(0 < row["agent_loop/generate_sequences/mean"] < row["timing_s/gen"] for row in rows)
    assert 0 < sum(row["tool/failure_frequency"] for row in rows) < len(rows)
    assert all(row["rollout/train_logprob_abs_diff"] < 1e-5 for row in rows)
    before, journal = made(tool_runs), journal_of(fused)
    assert before == len(journal) and any(entry.error for entry in journal)
    assert {entry.iteration for entry in journal} == {"0", "0/val", "1", "1/val"}
    serial = tool_runs("serial", f"{SERIAL} {HELD_OUT}")
    assert_same_bits(fused, serial)
    assert made(tool_runs) == 2 * before
    replayed = tool_runs("replayed", f"fusion.threshold=3 {HELD_OUT} rollout.multi_turn.replay={fused}")
    assert_same_bits(fused, replayed)
    assert made(tool_runs) == 2 * before and not journal_of(replayed)


def test_samples_are_kept_with_their_turns(tool_runs):
    samples = read_samples(tool_runs("fused", f"{FUSED} {HELD_OUT} trainer.save_every=1") / "samples.jsonl")
    several = [sample for sample in samples if sample.turns]
    assert several and {sample.split for sample in samples} == {"train", "val"}
    for sample in several:
        *before, last = sample.turns
        assert last.observed == "" and last.seconds == 0 and before
        assert all(turn.observed.startswith("w2 ") and turn.seconds > 0 for turn in before)
        texts = [text for turn in sample.turns for text in (turn.drawn, turn.observed) if text]
        assert " ".join(texts) == sample.response


def test_a_run_that_was_killed_makes_the_calls_again_that_it_had_not_written_down(tool_runs):
    """What a kill leaves in the second iteration: some answers, and half a line."""
    whole = tool_runs("fused", f"{FUSED} {HELD_OUT} trainer.save_every=1")
    killed = tool_runs("killed", f"{FUSED} {HELD_OUT} trainer.save_every=1 trainer.iterations=1")
    begin_again(killed)
    later = [entry for entry in journal_of(whole) if entry.iteration == "1"]
    lines = (whole / "tool_calls.0.jsonl").read_text().splitlines()
    known = [line for line in lines if json.loads(line)["iteration"] == "1"][:2]
    assert len(known) == 2 < len(later)
    with open(killed / "tool_calls.0.jsonl", "a") as file:
        file.write("\n".join(known) + '\n{"iteration": "1", "sam')
    before = made(tool_runs)
    tool_runs("killed", f"{FUSED} {HELD_OUT} trainer.save_every=1 trainer.resume=auto", again=True)
    assert_same_bits(whole, killed)
    held_out = [entry for entry in journal_of(whole) if entry.iteration == "1/val"]
    assert made(tool_runs) - before == len(later) - 2 + len(held_out)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_is_serial(tool_runs, kind):
    fused = tool_runs(kind, KINDS[kind], f"{FUSED} {HELD_OUT}")
    serial = tool_runs(f"{kind}-serial", KINDS[kind], f"{SERIAL} {HELD_OUT}")
    assert_same_bits(fused, serial)
    rows = metrics_of(fused)
    if kind == "fails":
        assert any(row["tool/failure_frequency"] for row in rows)
    if kind == "of-a-world":
        assert all(row["critic/score/max"] > 2 for row in rows) and all(entry.state for entry in journal_of(fused))
    if kind == "filtered":
        assert all(row["num_turns/max"] == 2 for row in rows)


def test_tensor_ranks_observe_together(tool_runs):
    one = tool_runs("tensor-ranks", f"{ON_ONE_INSTANCE} trainer.iterations=1")
    row = metrics_of(one)[0]
    assert row["num_turns/max"] > 2 and row["rollout/train_logprob_abs_diff"] < 1e-5
