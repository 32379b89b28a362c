"""Tiers of tests, their order, their fixtures, what is skipped, and the last line of a run."""

import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

from rlhfuse.base.launcher import START
from testkit import durations, profiles, tiers
from testkit.paths import ROOT
from testkit.programs import Programs
from testkit.workers import Pools

STARTS_PROGRAMS = ("python", "mpirun", "bash", "sh")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlhfuse")
    tier = "everyday: in-process tests, a file of ranks a room, one run; ci: all that is not slow; all"
    group.addoption("--tier", choices=tiers.TIERS, default=tiers.CI, help=f"{tier} [ci]")
    group.addoption("--expected-skips", action="store_true", help="fail where a test is skipped that CI should run")
    group.addoption("--record", action="store_true", help="write what files took to tests/testkit/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    everyday = config.option.tier == tiers.EVERYDAY
    settings.load_profile(profiles.EVERYDAY if everyday else profiles.FULL)
    for kind in (tiers.IN_PROCESS, tiers.RANKS, tiers.PROGRAMS):
        config.addinivalue_line("markers", f"{kind}: what the test is made of; set by its fixtures")
    guard = Guard()
    config.pluginmanager.register(guard)
    sys.addaudithook(guard.hear)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Told(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with its machinery and tier, leave out those of a later tier, longest files first."""
    tier = tiers.ALL if any("::" in argument for argument in config.args) else config.option.tier
    kept: list[pytest.Item] = []
    for item in items:
        kind = tiers.machinery(getattr(item, "fixturenames", []))
        own = tiers.tier_of(item.nodeid, kind, {mark.name for mark in item.iter_markers()})
        item.add_marker(kind)
        item.user_properties.append(("tier", own))
        if own in durations.within(tier):
            kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    table = durations.recorded()
    items[:] = sorted(kept, key=lambda item: -durations.seconds_of(file_of(item.nodeid), tier, table))


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


class Guard:
    """Sees to it that a test which starts a program says so, by its fixtures."""

    def __init__(self) -> None:
        self._in_process = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._in_process = item.get_closest_marker(tiers.PROGRAMS) is None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._in_process = False

    def hear(self, event: str, arguments: tuple) -> None:
        if event == "subprocess.Popen" and self._in_process:
            given = [arguments[1]] if isinstance(arguments[1], str | bytes) else arguments[1]
            program, *words = map(os.fsdecode, given)
            own = words[:2] == ["-c", START] and words[2].startswith(
                "rlhfuse."
            )  # kernels compiled apart, once on a machine
            if Path(program).name.startswith(STARTS_PROGRAMS) and not own:
                raise AssertionError(f"a test starts {program} and does not use the fixture 'programs'")


class Told:
    """What the whole run did; with several processes, in the one that hands out the tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.begin = config, time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()
        self.took: dict[tuple[str, str], float] = defaultdict(float)

    def pytest_report_header(self, config: pytest.Config) -> str:
        table, tier, asked = durations.recorded(), config.option.tier, tuple(self._asked())
        seconds = sum(durations.seconds_of(file, tier, table) for file in table if file.startswith(asked))
        processes = config.getoption("numprocesses", None) or 1
        minutes = f"about {seconds / processes / 60:.1f} minutes" if seconds else "not timed yet"
        return f"tests of tier '{tier}': {minutes}, {processes} files at a time"

    def _asked(self) -> list[str]:
        words = [word.split("::")[0].rstrip("/") for word in self.config.args]
        return [os.path.relpath(Path(self.config.invocation_params.dir, word), ROOT) for word in words]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if tier := dict(report.user_properties).get("tier"):  # none where the test's process has died
            self.took[file_of(report.nodeid), tier] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skips[str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skips[str(report.longrepr[2])] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.config.option.record:
            gone = {file for file in durations.recorded() if not (ROOT / file).exists()}
            durations.record(self.took, self.config.option.tier, gone)

    @property
    def unexpected(self) -> list[str]:
        asked = self.config.option.expected_skips
        return [reason for reason in self.skips if asked and not tiers.is_expected(reason)]

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """The last line: passed, skipped and why, minutes."""
        reasons = "; ".join(f"{count} {reason.removeprefix('Skipped: ')}" for reason, count in self.skips.items())
        skipped = f", {sum(self.skips.values())} skipped ({reasons})" if self.skips else ""
        failed = f", {self.outcomes['failed']} FAILED" if self.outcomes["failed"] else ""
        for reason in self.unexpected:
            print(f"error: CI should not skip: {reason.removeprefix('Skipped: ')}")
        minutes = (time.monotonic() - self.begin) / 60
        print(f"== {self.outcomes['passed']} passed{failed}{skipped}, {minutes:.1f} minutes", flush=True)


@pytest.fixture(scope="session")
def programs():
    """Starts programs of this checkout; the test is one of programs by that."""
    started = Programs()
    yield started
    started.end_all()


@pytest.fixture(autouse=True)
def _nothing_is_left_running(request: pytest.FixtureRequest):
    started = request.getfixturevalue("programs") if "programs" in request.fixturenames else None
    yield
    if started:
        started.end_all()


@pytest.fixture(scope="session")
def pools():
    """Pools of ranks, one of each size; they end with the file of tests that used them."""
    made = Pools()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def _ranks_end_with_their_file(request: pytest.FixtureRequest):
    wanted = any("pools" in item.fixturenames for item in request.session.items if item.path == request.path)
    made = request.getfixturevalue("pools") if wanted else None
    yield
    if made:
        made.close()


@pytest.fixture(scope="module")
def workers(request: pytest.FixtureRequest, pools: Pools):
    """Ranks for the tests of a file: four, or as many as its POOL_RANKS says."""
    return pools.of(getattr(request.module, "POOL_RANKS", 4))
