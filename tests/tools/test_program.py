"""How programs end on each exception: what they print, and what they leave for torchrun's table."""

import json
import os
import subprocess
import sys

import program
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program import run_program
from testkit.profiles import examples
from testkit.programs import TIMEOUT_SECONDS

from rlhfuse.base import errors
from rlhfuse.base.errors import InputError, RewardError, Stopped


def ended(error, capsys, **options):
    """Exit code and stderr of a program that raises the error, or returns what is none."""

    def main():
        if isinstance(error, BaseException):
            raise error
        return error

    with pytest.raises(SystemExit) as caught:
        run_program(main, **options)
    return caught.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code, said",
    [
        (None, 0, ""),
        (1, 1, ""),
        (InputError("a value\n  and its fix"), 2, "error: a value and its fix\n"),
        (RewardError("sample 3\n raised x"), 1, "error: sample 3 raised x\n"),
        (FloatingPointError("no number"), 1, "error: no number\n"),
        (Stopped("stopped: go on with x"), 130, "stopped: go on with x\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("interrupted in: x"), 130, "interrupted in: x\n"),
    ],
)
def test_one_line_says_it(monkeypatch, capsys, error, code, said):
    monkeypatch.delenv("RANK", raising=False)
    assert ended(error, capsys) == (code, said)
    with pytest.raises(ZeroDivisionError):
        ended(ZeroDivisionError(), capsys)


def test_a_rank_that_fails_leaves_its_error_for_torchrun(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for prints in (True, False):
        code, said = ended(ZeroDivisionError("by 0"), capsys, prints=lambda *_, mine=prints: mine)
        assert code == 1
        lines = said.splitlines()
        assert not lines or (lines[0].startswith("Traceback") and lines[-1] == "error: rank 3: ZeroDivisionError: by 0")
        assert bool(lines) == prints, "the line stands in the table, once more on the screen is enough"
    told = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert told == "error: rank 3: ZeroDivisionError: by 0"


def test_ranks_say_once_that_the_run_has_stopped_or_was_given_bad_input(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(program.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    of_ranks = {"prints": lambda what, seconds: False}
    for error in (Stopped("stopped"), KeyboardInterrupt()):
        assert ended(error, capsys, **of_ranks) == (130, "")
    assert ended(InputError("x"), capsys, **of_ranks) == (2, "") and waited == [program.RANK_0_FIRST_SECONDS]


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "0", errors.LAST_WORD: "launcher"}, {"RANK": "x"}])
def test_a_program_that_is_no_rank_says_its_error_whatever_the_environment(monkeypatch, capsys, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ended(InputError("x"), capsys) == (2, "error: x\n") and ended(Stopped("y"), capsys) == (130, "y\n")
    with pytest.raises(ZeroDivisionError):
        ended(ZeroDivisionError(), capsys)


@examples(40)
@given(st.integers(0, 300_000), st.text("ab \n", max_size=50))
def test_a_message_of_any_length_keeps_its_beginning_and_its_fix(characters, other):
    whole = f"a key={other}{'x' * characters} is none; set another"
    line = program._one_line(InputError(whole))
    assert len(line) <= program.MOST_CHARACTERS + 40 and "\n" not in line
    assert line.startswith("a key=") and line.endswith("x is none; set another" if characters else "set another")
    assert line == " ".join(whole.split()) or f"({len(' '.join(whole.split())) - program.MOST_CHARACTERS}" in line


WRITES = """
import os, sys
from rlhfuse.base.errors import InputError, say_at_once
from rlhfuse.tools.program import run_program

def main():
    print("first", flush=True)
    sys.stdin.readline()  # the reader has left
    for number in range(20000):
        print("line", number)
    say_at_once("said")
    print("err", file=sys.stderr)
    open(sys.argv[1], "w").write("done")
    if sys.argv[2] == "refused":
        raise InputError("x")

run_program(main)
"""


@pytest.mark.parametrize("how, code", [("well", 0), ("refused", 2)])
def test_a_program_goes_on_when_the_reader_of_its_output_has_left(programs, tmp_path, how, code):
    read, write = os.pipe()
    words = [sys.executable, "-c", WRITES, str(tmp_path / "file"), how]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=write, stderr=write, text=True)
    os.close(write)
    with open(read) as reader:
        assert reader.readline() == "first\n"
    process.communicate("\n", timeout=TIMEOUT_SECONDS)
    assert process.returncode == code and (tmp_path / "file").read_text() == "done"


def test_a_program_may_leave_without_being_torn_down(programs):
    source = """
import atexit, threading, time
from rlhfuse.tools.program import run_program

class Kept:
    def __del__(self):
        print("torn down")

kept = Kept()
kept.itself = kept
atexit.register(print, "exit function")

def main():
    if THREAD:  # as a user's file starts it
        threading.Thread(target=time.sleep, args=(1e6,)).start()
    print("main")
    return 3

run_program(main, tear_down=TEAR_DOWN)
"""
    for tear_down, thread, last in (True, False, ["torn down"]), (False, False, []), (True, True, []):
        done = programs.python("-c", source.replace("TEAR_DOWN", str(tear_down)).replace("THREAD", str(thread)))
        assert (done.returncode, done.stderr) == (3, "")
        assert done.stdout.split() == [*"main exit function".split(), *" ".join(last).split()]
