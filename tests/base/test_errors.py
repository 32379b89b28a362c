"""How programs end on each exception: what they print, and what they leave for torchrun's table."""

import json

import pytest

from rlhfuse.base.errors import RewardError, Stopped, run_program


def ended(error, capsys, **options):
    def main():
        raise error

    with pytest.raises(SystemExit) as caught:
        run_program(main, **options)
    return caught.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code, said",
    [
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


def test_ranks_say_once_that_the_run_has_stopped(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert ended(Stopped("stopped"), capsys) == (130, "") == ended(KeyboardInterrupt(), capsys)
