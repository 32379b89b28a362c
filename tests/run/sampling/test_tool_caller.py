"""What becomes of a turn's calls on an instance's leader: answered in order, journalled, moved with their samples."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from testkit.programs import eventually
from testkit.tool_run import write_tool_run

from rlhfuse.base.errors import InputError, RewardError
from rlhfuse.base.json_values import read_json_lines
from rlhfuse.base.sample_ids import sample_id
from rlhfuse.config.load import load_config
from rlhfuse.data.prompts import Prompt
from rlhfuse.data.tool_journal import JournalEntry
from rlhfuse.fusion.inter.iteration_store import IterationStore
from rlhfuse.run.run_tools import find_tools
from rlhfuse.run.sampling.tool_caller import ToolCaller

WAITS = '''
import os, signal, time
from pathlib import Path

class Waits:
    def __init__(self):
        self.words = []

    def count(self, word: str) -> str:
        """
        Waits for a file, and says all words.

        Args:
            word: one more
        """
        while word == "w9" and not Path(__file__).with_name("go").exists():
            time.sleep(0.001)
        if word == "w8":
            raise ValueError("w12")
        if word == "w7":
            return "w10 " * 3_000_000
        if word == "w6":
            os.kill(os.getpid(), signal.SIGKILL)
        self.words.append(word)
        return " ".join(self.words)
'''
ROW = {"prompt": [{"role": "user", "content": "w3"}]}


@pytest.fixture
def world(tmp_path):
    """Callers of an environment that waits; their words are ids three larger, and the end is 2."""
    from transformers import AutoTokenizer

    config = write_tool_run(tmp_path)
    (tmp_path / "waits.py").write_text(WAITS)
    made = []

    def caller(rank=0, leads=True, **settings):
        more = ["rollout.multi_turn.workers=2"] + [
            f"rollout.multi_turn.{key}={value}" for key, value in settings.items()
        ]
        more.append(f"rollout.multi_turn.function_tool_path={tmp_path}/waits.py:Waits")
        run = load_config(config, [*more, "trainer.resume=auto"])
        tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "actor"))
        actor, prompt = SimpleNamespace(eos_token_ids=(2,)), Prompt((4,), ROW, "p.jsonl:1", ROW["prompt"])
        made.append(ToolCaller(run, find_tools(run, actor, tokenizer, [prompt]), rank, tmp_path, leads, 0))
        made[-1].begin("0", [prompt] * 3)
        return made[-1]

    yield SimpleNamespace(caller=caller, folder=tmp_path, go=(tmp_path / "go").touch)
    (tmp_path / "go").touch()
    for one in made:
        one.close()


def journal(world, rank):
    return read_json_lines(JournalEntry, world.folder / f"tool_calls.{rank}.jsonl")


def turn(*words):
    return (*(word + 3 for word in words), 2)


def answer_of(caller, sample):
    found = []
    eventually(lambda: found.extend(one for one in caller.answers() if one.sample_id == sample) or found)
    return found[0]


def words(*numbers):
    return tuple(number + 3 for number in numbers)


def test_all_ranks_know_what_a_turn_asks_for(world):
    leader, other = world.caller(max_assistant_turns=3), world.caller(leads=False, max_assistant_turns=3)
    for each in (leader, other):
        assert each.asks(turn(4, 9), 0) and each.asks(turn(4, 9), 1) and not each.asks(turn(4, 9), 2)
        assert not each.asks(turn(10, 11), 0) and not each.asks(turn(4, 9)[:-1], 0)


def test_calls_of_a_turn_are_made_one_on_the_other_and_written_down(world):
    caller, sample = world.caller(), sample_id(0, 1, 0)
    caller.submit(sample, 0, turn(4, 10, 5, 11, 6, 12), 40)
    first = answer_of(caller, sample)
    assert (
        first.tokens == words(2, 10, 2, 10, 11, 1) and not first.failed and first.seconds > 0
    )  # the third is not made
    caller.delivered([sample])
    assert caller.answers() == [] and caller.waiting() == ""
    caller.submit(sample, 1, turn(4, 8), 40)
    assert answer_of(caller, sample).tokens[0] == words(2)[0]  # the model is told of the failure
    caller.delivered([sample])
    caller.submit(sample, 2, turn(4, 12), 4)
    assert answer_of(caller, sample).tokens == ()  # w2 w10 w11 w12 w1 has no room
    stats = caller.take_stats()
    assert stats.calls == {sample: 4} and stats.failures == {sample: 1} and not caller.take_stats().calls
    assert stats.failed == {"count": "Error: ValueError: w12"} and stats.answered == {"count"}
    written = journal(world, 0)
    assert [entry.number for entry in written] == [0, 1, 2, 4] and written[2].error == "Error: ValueError: w12"
    assert written[1].state == written[2].state != written[3].state


def test_who_goes_on_is_answered_from_the_journal(world):
    first, sample = world.caller(), sample_id(0, 1, 0)
    first.submit(sample, 0, turn(4, 10), 40)
    known = answer_of(first, sample)
    other = world.caller(rank=1)
    other.submit(sample, 0, turn(4, 10), 40)
    assert [one.tokens for one in other.answers()] == [known.tokens]  # at once
    assert not journal(world, 1) and other.state(sample) == first.state(sample)


def test_answers_and_states_follow_samples_that_move(world):
    """One that waits, one whose answer is there, one that decodes."""
    here, there = world.caller(), world.caller(rank=1)
    stores = [IterationStore(dist.PrefixStore("x", dist.HashStore()), "0", 10.0)] * 2
    waits, ready, decodes = (sample_id(0, place, 0) for place in range(3))
    for sample, word in ((waits, 9), (ready, 10), (decodes, 11)):
        here.submit(sample, 0, turn(4, word), 40)
        if sample != waits:
            answer_of(here, sample)
    here.delivered([decodes])
    assert here.waiting().startswith(f"tool count of sample {waits}, turn 0 (")
    here.hand_over([waits, ready, decodes], stores[0])
    there.adopt([waits, ready, decodes], stores[1])
    assert answer_of(there, ready).tokens == words(2, 10, 1)
    there.submit(decodes, 1, turn(4, 12), 40)
    assert answer_of(there, decodes).tokens == words(2, 11, 12, 1)
    assert there.waiting() == f"a tool of sample {waits}, called elsewhere"
    world.go()
    moved = answer_of(there, waits)
    assert moved.tokens == words(2, 9, 1) and there.state(waits) and there.waiting() == ""
    assert [there.said(sample) for sample in (waits, ready)] == [[[["count", f"w{n}"]]] for n in (9, 10)]
    assert there.said(decodes) == [[["count", "w11"]], [("count", "w11 w12")]]
    here.begin("1", ())
    assert here.answers() == []


def test_a_long_answer_is_cut_before_it_is_written_down(world):
    caller, sample = world.caller(), sample_id(0, 0, 0)
    caller.submit(sample, 0, turn(4, 7), 40)
    answer = answer_of(caller, sample)
    assert answer.tokens[:2] == words(2, 10) and len(answer.tokens) <= 8  # a mark before and behind
    [entry] = journal(world, 0)
    assert 0 < len(entry.answer) < 100 and caller.said(sample) == [[("count", entry.answer)]]


def test_what_the_machine_ends_is_no_answer(world):
    caller, sample = world.caller(), sample_id(0, 0, 0)
    caller.submit(sample, 0, turn(4, 6), 40)
    with pytest.raises(RewardError, match=f"tool count of sample {sample} .*exit code -9, 3 times"):
        eventually(lambda: caller.answers())
    assert not journal(world, 0)


def test_a_journal_that_cannot_be_written_ends_who_waits(world, monkeypatch):
    here, there = world.caller(), world.caller(rank=1)
    store, sample = IterationStore(dist.PrefixStore("x", dist.HashStore()), "0", 10.0), sample_id(0, 0, 0)
    here.submit(sample, 0, turn(4, 9), 40)

    def full(entry):
        raise InputError("tool_calls.0.jsonl: no space left")

    monkeypatch.setattr(here._journal, "append", full)
    here.hand_over([sample], store)
    there.adopt([sample], store)
    world.go()
    with pytest.raises(InputError, match=f"sample {sample}, whose tools were called elsewhere: .*no space left"):
        eventually(lambda: there.answers())
