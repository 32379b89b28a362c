"""Reward functions: found by name, held against rows before anything runs, called in processes, failing by name."""

import itertools
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
from testkit.programs import eventually

from rlhfuse.base.errors import InputError, RewardError
from rlhfuse.data import call_pool
from rlhfuse.data.call_pool import ASYNC_AT_ONCE
from rlhfuse.data.reward_function import RewardCall, RewardFunction
from rlhfuse.data.reward_workers import RewardWorkers

SOURCE = """
import asyncio, multiprocessing, os, time
from rlhfuse.data import call_pool

class Clock:  # of a worker: it stands still but for what the functions say
    now = 0.0

    def monotonic(self):
        return self.now

clock = Clock()
if multiprocessing.parent_process():
    call_pool.time = clock

def length(data_source, solution_str, ground_truth, extra_info=None):
    print("scoring", solution_str)
    return len(solution_str) + float(ground_truth)

def words(prompts, completions, level, **columns):
    return [len(c.split()) * l for c, l in zip(completions, level)]

def ids(completion_ids):
    return [float(sum(i)) for i in completion_ids]

returned = []

async def stuck(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "returns":
        returned.append(await asyncio.sleep(0))
        return 1.0
    while solution_str == "awaits" and not returned:
        await asyncio.sleep(0.001)
    await asyncio.sleep(1e6)

def takes_long(data_source, solution_str, ground_truth, extra_info=None):
    clock.now += 0.25
    return 1.0

begun = []

async def take_long(data_source, solution_str, ground_truth, extra_info=None):
    begun.append(1)
    while len(begun) < 4:  # all are under way
        await asyncio.sleep(0.001)
    clock.now = 0.25
    return 1.0

def has_a_pool(data_source, solution_str, ground_truth, extra_info=None):
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        return sum(pool.map(abs, [float(ground_truth), -1.0]))

def runs_programs(data_source, solution_str, ground_truth, extra_info=None):
    import subprocess
    program = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(solution_str, "w") as file:
        file.write(str(program.pid))
    program.wait()

async def trips(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    raise KeyError(solution_str)

def several(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise KeyError("no such thing")
    if solution_str == "exit":
        os._exit(7)
    if solution_str == "forever":
        while True:
            time.sleep(0.01)
    return 1.0

def checked(size):
    1 / size
    return size

def ranks(prompts, completions, level):
    assert prompts == ["p"] * 3 and level == [3] * 3
    sizes = [checked(len(text)) for text in completions]
    return [float(sorted(sizes).index(size)) for size in sizes]

NUMBER = 3
"""
ROW = {"data_source": "x", "prompt": "p", "reward_model": {"ground_truth": "4"}, "level": 3}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(SOURCE)
    return path


def call(sample, text, row=ROW, prompt="p"):
    return RewardCall((sample,), row, prompt, (text,), ((5, 6),), f"p.jsonl:{sample + 1}")


def together(*texts):
    """A call about samples 16, 17, .. of one prompt."""
    ids = tuple(range(16, 16 + len(texts)))
    return RewardCall(ids, ROW, "p", texts, ((5, 6),) * len(texts), "p.jsonl:3")


@pytest.fixture
def calling(file):
    """Makes workers for a function of the file; all are ended."""
    made = []

    def start(function, signature="verl", count=1, timeout=540.0, **more):
        made.append(RewardWorkers(([f"{file}:{function}"], signature), count, timeout, **more))
        return made[-1]

    yield start
    for one in made:
        one.close()


# loading and checking -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, message",
    [
        ("length", "not of the form module:function"),
        ("no_such_module_at_all:f", "'no_such_module_at_all'); install it, or name a file as FILE.py:NAME"),
        ("/nowhere/mine.py:length", "file /nowhere/mine.py does not exist"),
        ("{file}:nothing", "has no function nothing"),
        ("{file}:NUMBER", "has no function NUMBER"),
        ("{folder}/broken.py:f", "broken.py cannot be imported (AttributeError"),
        ("{folder}/leaves.py:f", "leaves.py cannot be imported (SystemExit: 0)"),
    ],
)
def test_functions_that_are_not_there(tmp_path, file, name, message):
    (tmp_path / "broken.py").write_text("import math\nmath.nothing\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    for _ in range(2):  # what fails is executed anew
        with pytest.raises(InputError) as caught:
            RewardFunction.load(name.format(file=file, folder=tmp_path), "verl")
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "function, signature, row, message",
    [
        ("length", "verl", ROW, None),
        ("words", "trl", ROW, None),
        ("ids", "trl", ROW, None),
        ("length", "verl", {"prompt": "p"}, "f:3: no key 'data_source'"),
        ("length", "verl", {"data_source": "x", "reward_model": "42"}, "reward_model is '42'; it needs a ground_truth"),
        ("words", "verl", ROW, "cannot be called as reward.signature=verl says"),
        ("length", "trl", ROW, "reward.signature=trl says (missing a required argument: 'solution_str')"),
        ("words", "trl", {"prompt": "p"}, "(missing a required argument: 'level'); f:3 offers prompts, completions"),
    ],
)
def test_rows_and_signatures_are_checked_without_a_call(file, function, signature, row, message):
    loaded = RewardFunction.load(f"{file}:{function}", signature)
    if message is None:
        loaded.check(row, "p", "f:3")
        return
    with pytest.raises(InputError) as caught:
        loaded.check(row, "p", "f:3")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "parameters, signature",
    [
        ("data_source, solution_str, ground_truth, extra_info=None", "verl"),
        ("solution_str, **others", "verl"),
        ("prompts, completions, **columns", "trl"),
        ("completions, ground_truth, data_source", "trl"),  # columns of the row, as it happens
        ("*, completion_ids", "trl"),
        ("**columns", "none of"),
        ("data_source, ground_truth, **columns", "none of"),
        ("solution_str, /, ground_truth", "none of"),  # called by names
        ("completions=None, solution_str=None, **others", "both of"),
    ],
)
def test_auto_finds_the_signature_by_the_parameters_names_or_asks(tmp_path, parameters, signature):
    (tmp_path / "mine.py").write_text(
        f"def score({parameters}):\n    pass\nclass Score:\n    def __call__(self, {parameters}):\n        pass\n"
        "instance = Score()\n"
    )
    for name in (f"{tmp_path}/mine.py:score", f"{tmp_path}/mine.py:instance"):
        if signature in ("verl", "trl"):
            assert RewardFunction.load(name, "auto").signature == signature
            continue
        with pytest.raises(InputError) as caught:
            RewardFunction.load(name, "auto")
        own = "solution_str (verl) and completion_ids, completions, prompts (trl)"
        asked = f"{own}: set reward.signature=verl or reward.signature=trl"
        assert str(caught.value) == f"reward.function={name} takes {signature} {asked}"
        assert RewardFunction.load(name, "trl").signature == "trl"


def test_chat_prompts_make_chat_completions(file):
    turns = [{"role": "user", "content": "hi"}]
    arguments = RewardFunction.load(f"{file}:words", "trl").arguments(call(0, "yes", prompt=turns))
    assert arguments["prompts"] == [turns] and arguments["level"] == [3]
    assert arguments["completions"] == [[{"role": "assistant", "content": "yes"}]]


def test_every_column_reaches_a_function_whatever_its_name_but_the_prompts_own(file):
    everything = RewardFunction("f", "trl", lambda completions, **columns: columns)
    row = {"prompt": "p", "ground-truth": "72", "class": 1, "a b": None, "": 2, "π": 3, "1": 4}
    given = everything.arguments(call(0, "yes", row))
    wanted = {key: [value] for key, value in row.items() if key != "prompt"}
    assert given == wanted | {"prompts": ["p"], "completions": ["yes"], "completion_ids": [[5, 6]]}
    assert everything.arguments(call(0, "yes", {"q": "p", "prompt": "other"}))["prompt"] == ["other"]
    with pytest.raises(InputError, match="f:3: .*'completions'.*rename"):
        everything.check(row | {"completions": 1}, "p", "f:3")


def test_rows_are_given_as_in_trl_and_verl(file):
    """A turn that a response goes on with is in its completion; without extra_info there is an empty one."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "It "}]}]
    given = RewardFunction.load(f"{file}:words", "trl").arguments(call(0, "is", prompt=turns))
    whole = [[{"role": "assistant", "content": "It is"}]]
    assert (given["prompts"], given["completions"]) == ([turns[:1]], whole)
    assert RewardFunction.load(f"{file}:length", "verl").arguments(call(0, "yes"))["extra_info"] == {}


# calling --------------------------------------------------------------------------------------------------------


def test_scores_come_back_by_sample_id(calling):
    plain, columns = calling("length", count=2), calling("words", "trl")
    for first in (0, 10):  # two iterations
        plain.submit([call(first + n, "a" * n) for n in range(5)])
        columns.submit([call(first, "one two")])
        assert plain.finish() == {first + n: n + 4.0 for n in range(5)}
        assert columns.finish() == {first: 6.0}
    assert plain.finish() == {}


def test_calls_are_timed_where_they_run(calling):
    """Not while they wait for a worker; those of an async function that are under way together each count whole."""
    one, several = calling("takes_long"), calling("take_long")
    for made, at_once in ((one, 1), (several, ASYNC_AT_ONCE)):
        made.submit([call(n, "x") for n in range(4)])
        assert len(made.finish()) == 4
        assert made.take_calls() == (4, at_once, 1.0)
        assert made.take_calls() == (0, at_once, 0.0)


def test_a_function_may_have_children(calling):
    pooled = calling("has_a_pool")
    pooled.submit([call(17, "here")])
    assert pooled.finish() == {17: 5.0}


def test_what_a_late_function_has_started_ends_with_it(calling, tmp_path, monkeypatch):
    """It is late once it has started a program."""
    file, running = tmp_path / "pid", calling("runs_programs", timeout=5.0)
    seconds = itertools.count()
    late = lambda: float(next(seconds)) if file.exists() and file.read_text() else 0.0  # noqa: E731
    monkeypatch.setattr(call_pool, "time", SimpleNamespace(monotonic=late))
    running.submit([call(17, str(file))])
    with pytest.raises(RewardError, match="no result after 5 s"):
        running.finish()
    pid = int(file.read_text())
    eventually(lambda: not alive(pid), "the program outlived its worker")


@pytest.mark.parametrize("function", ["length", "stuck"])
def test_calls_that_return_are_told_while_all_are_waited_for(calling, function):
    """Plain and async ones: who waits long reports progress, and nothing once all is there."""
    told = []
    waited = calling(function, progress=told.append)
    waited.submit([call(n, "returns") for n in range(4)])
    waited.finish()
    assert told and all(text.startswith("inference: waiting for the reward function, ") for text in told)
    before = len(told)
    waited.finish()
    assert len(told) == before


@pytest.mark.parametrize(
    "function, first, text, message",
    [
        ("several", "fine", "raise", "raised KeyError: 'no such thing', at "),
        ("several", "fine", "exit", "its process ended with exit code 7"),
        ("several", "", "forever", "no result after 2 s (reward.timeout_seconds)"),
        ("trips", "", "here", "raised KeyError: 'here', at "),
        ("stuck", "returns", "awaits", "no result after 2 s (reward.timeout_seconds)"),
    ],
)
def test_failures_name_function_and_sample(calling, function, first, text, message):
    """Those of plain functions and of async ones."""
    failing = calling(function, timeout=2.0 if "no result" in message else 540.0)
    if first:  # not before 'forever': with that time-out it could be late itself, where much else is running
        failing.submit([call(3, first)])
    with pytest.raises(RewardError) as caught:
        failing.submit([call(17, text)])  # which raises where it is known at once
        failing.finish()
    assert f"mine.py:{function}, sample 17 of p.jsonl:18: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not multiprocessing.active_children()


def test_a_trl_function_has_all_samples_of_a_prompt(calling, file):
    """Columns and prompts are repeated for each, as TRL does; what fails names them all, and the line at fault."""
    ranked, failing = calling("ranks", "trl"), calling("ranks", "trl")
    ranked.submit([together("a", "abc", "ab")])
    assert ranked.finish() == {16: 0.0, 17: 2.0, 18: 1.0}
    calls, at_once, _ = ranked.take_calls()
    assert (calls, at_once) == (3, 3)
    with pytest.raises(RewardError) as caught:
        failing.submit([together("a", "", "ab")])
        failing.finish()
    line = SOURCE[: SOURCE.index("    1 / size")].count("\n") + 1
    message = f"samples 16 to 18 of p.jsonl:3: raised ZeroDivisionError: division by zero, at {file}:{line}"
    assert str(caught.value).endswith(f"{message} in checked: 1 / size")


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
