"""Which tests run when: tiers by machinery, what a change reaches, what CI may skip, what is told at the end."""

import json
import re

import pytest
from testkit import durations, tiers
from testkit.imports import changed_files, reaching
from testkit.paths import NO_DATA, ROOT, TESTS

from rlhfuse.base.errors import InputError

pytest_plugins = ["pytester"]
FILES = sorted(str(file.relative_to(ROOT)) for file in TESTS.rglob("test_*.py"))


@pytest.mark.parametrize(
    "fixtures, markers, kind, tier",
    [
        (["tmp_path"], set(), tiers.IN_PROCESS, tiers.EVERYDAY),
        (["tmp_path"], {"ci"}, tiers.IN_PROCESS, tiers.CI),
        (["workers"], set(), tiers.RANKS, tiers.CI),
        (["pools", "programs"], set(), tiers.PROGRAMS, tiers.CI),
        (["programs"], {"slow"}, tiers.PROGRAMS, tiers.ALL),
    ],
)
def test_machinery_decides_the_tier(fixtures, markers, kind, tier):
    assert tiers.machinery(fixtures) == kind
    assert tiers.tier_of("tests/x.py::test", kind, markers) == tier
    least = tier if "slow" in markers or kind == tiers.IN_PROCESS else tiers.EVERYDAY
    assert tiers.tier_of(f"{tiers.DAILY[0]}[x]", kind, markers) == least


def test_every_room_of_ranks_has_a_file_that_runs_every_day():
    users = re.compile(r"\b(workers\.run|pools\.of)\(")
    rooms = {file.relative_to(TESTS).parts[0] for file in TESTS.glob("*/**/*.py") if users.search(file.read_text())}
    rooms.discard("testkit")
    assert len(rooms) > 5 and all(daily.split("::")[0] in FILES for daily in tiers.DAILY)
    without = sorted(room for room in rooms if not any(one.startswith(f"tests/{room}/") for one in tiers.DAILY))
    assert not without, f"testkit/tiers.py: DAILY has no file of {', '.join(without)}"


def test_only_what_is_known_may_be_skipped_in_ci(monkeypatch):
    assert tiers.is_expected("Skipped: no CUDA device here") and not tiers.is_expected("Skipped: no reason")
    for folder, expected in (("", True), ("data", False)):
        monkeypatch.setenv("RLHFUSE_TEST_DATA", folder)
        assert tiers.is_expected(f"Skipped: {NO_DATA}") == expected


@pytest.mark.parametrize(
    "changed, some, none",
    [
        ("rlhfuse/ppo/losses.py", "tests/ppo/test_losses.py", "tests/schedule/ir/test_checker.py"),
        ("rlhfuse/schedule/search/mpi.py", "tests/schedule/search/test_mpi.py", "tests/ppo/test_losses.py"),
        ("tools/show_schedule.py", "tests/tools/test_show_schedule.py", "tests/tools/test_plan.py"),
        ("tests/testkit/tiny.py", "tests/fusion/intra/test_executor.py", "tests/schedule/ir/test_checker.py"),
        ("scripts/setup.sh", "tests/test_installation.py", "tests/ppo/test_losses.py"),
        ("docs/howto/gpus.md", "tests/test_docs.py", "tests/ppo/test_losses.py"),
        ("examples/sums_grpo.yaml", "tests/run/test_whole_runs.py", "tests/ppo/test_losses.py"),
        ("LICENSE", "", "tests/ppo/test_losses.py"),
    ],
)
def test_a_change_reaches_the_tests_that_import_or_name_it(changed, some, none):
    found = reaching([changed], FILES)
    assert (not some or some in found) and none not in found


def test_a_change_of_what_all_tests_share_reaches_all():
    assert reaching(["tests/testkit/plugin.py"], FILES) == reaching(["setup.cfg"], FILES) == FILES
    assert reaching(["rlhfuse/ppo/gone.py"], FILES) == FILES, "whoever imported it can not be read off any more"
    assert reaching([], FILES) == reaching(["tests/ppo/test_gone.py"], FILES) == []


def test_a_commit_that_is_not_there_is_named():
    with pytest.raises(InputError, match="git knows no commit 'nowhere': "):
        changed_files("nowhere")


def test_durations_are_kept_by_file_and_tier(tmp_path, monkeypatch):
    monkeypatch.setattr(durations, "FILE", tmp_path / "durations.json")
    assert durations.seconds_of("new.py", tiers.CI, durations.recorded()) == 60.0
    durations.record({("a.py", "everyday"): 1.04, ("a.py", "all"): 9.0, ("b.py", "ci"): 2.0}, tiers.ALL, set())
    durations.record({("a.py", "everyday"): 3.0}, tiers.EVERYDAY, {"b.py"})
    table = json.loads((tmp_path / "durations.json").read_text())
    assert table == durations.recorded() == {"a.py": {"everyday": 3.0, "all": 9.0}}
    assert [durations.seconds_of("a.py", tier, table) for tier in tiers.TIERS] == [3.0, 3.0, 12.0]


SUITE = """
import subprocess, sys
import pytest

def test_good(): pass

def test_starts(): subprocess.run([sys.executable, "-V"])

@pytest.mark.parametrize("reason", ["no CUDA device here", "too lazy"])
def test_left_out(reason): pytest.skip(reason)

@pytest.mark.slow
def test_slow(): raise RuntimeError
"""


@pytest.mark.parametrize(
    "more, code, last", [((), 1, "1 passed, 1 FAILED, 2 skipped"), (("-k", "good"), 0, "1 passed,")]
)
def test_the_last_line_says_what_passed_and_why_the_rest_did_not(pytester, more, code, last):
    pytester.makepyfile(SUITE)
    pytester.makeini("[pytest]\nmarkers =\n    slow:\n")
    result = pytester.runpytest_inprocess("-p", "testkit.plugin", "-p", "no:xdist", "--expected-skips", *more)
    assert result.ret == code and result.outlines[-1].startswith(f"== {last}")
    if code:
        assert "(1 no CUDA device here; 1 too lazy)" in result.outlines[-1]
        assert result.outlines[-2] == "error: CI should not skip: too lazy"
        result.stdout.fnmatch_lines("*AssertionError: a test starts *python* and does not use the fixture 'programs'*")
