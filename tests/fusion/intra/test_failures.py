"""A rank that dies or raises in any instruction of training: every other rank ends and says where it was.

Real processes under the watchdog. The fault is set off by the test's own progress function, which the executor calls
before each instruction and before each wait. Where the others must end up is worked out from the programs alone.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from testkit.disturbed_pair import Plan, disturbed, plan, write_models
from testkit.workers import forkserver, host_store, join

from rlhfuse.monitor.heartbeat import Limits
from rlhfuse.schedule.ir.action import Action, Kind

WORLD = 4
HANG_SECONDS = 20.0
STEP = 1  # the fault comes in the second step
_PLACE = re.compile(r"training instruction (\d+): (\S+)(?: waits (?:for|until) (.+))?")


@dataclass(frozen=True)
class Fault:
    """`rank` is killed (or raises, or hangs) as it comes to the instruction at `place`, or as it waits there."""

    rank: int
    place: int
    waiting: bool = False
    raises: bool = False
    hangs: bool = False


def work(rank: int, port: int, folder: Path, models: dict, what: Plan, fault: Fault) -> None:
    sys.stderr.flush()
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    import torch
    import torch.distributed as dist

    from rlhfuse.monitor.watchdog import Watchdog

    torch.set_num_threads(1)
    join(port, rank, WORLD)
    store = dist.TCPStore("127.0.0.1", port)
    number = 0

    def progress(text: str) -> None:
        watchdog.progress(text)
        seen = _PLACE.fullmatch(text)
        if number == STEP and seen:
            (folder / f"begun{rank}").touch()
        if number == STEP and rank == fault.rank and seen and int(seen[1]) == fault.place:
            if bool(seen[3]) == fault.waiting:
                while len(list(folder.glob("begun*"))) < WORLD:  # who has not would tell of the step before
                    time.sleep(0.01)
                (folder / "struck").write_text(str(time.time()))
                if fault.raises:
                    raise ValueError("a made-up failure")
                while fault.hangs:
                    time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)

    pair = disturbed(rank, models, what, progress=progress)
    dist.barrier()  # to build takes long where much else is running
    with Watchdog(store, rank, WORLD, Limits(hang_seconds=HANG_SECONDS if fault.hangs else 3600)) as watchdog:
        for number in range(STEP + 2):
            dist.barrier()  # so that nobody is still in the step before
            pair.train(number)
        dist.barrier()


class Run:
    """Four ranks that train until the fault; ended and read when `wait` returns."""

    def __init__(self, folder: Path, models: dict, what: Plan, fault: Fault) -> None:
        self.store = host_store()
        self.folder = folder
        context = forkserver()
        arguments = (self.store.port, folder, models, what, fault)
        self.ranks = [context.Process(target=work, args=(rank, *arguments)) for rank in range(WORLD)]
        for process in self.ranks:
            process.start()

    def wait(self) -> float:
        """Seconds from the fault to the end of the last rank; kills what is left after a while."""
        try:
            deadline = time.monotonic() + 540
            while any(process.is_alive() for process in self.ranks):
                assert time.monotonic() < deadline, [self.stderr(rank)[-2000:] for rank in range(WORLD)]
                time.sleep(0.05)
            struck = self.folder / "struck"
            assert struck.exists(), "the fault was never reached:\n" + self.stderr(0)
            return time.time() - float(struck.read_text())
        finally:
            for process in self.ranks:
                process.kill()
                process.join()

    def stderr(self, rank: int) -> str:
        file = self.folder / f"stderr{rank}"
        return file.read_text() if file.exists() else ""


def places_reached(what: Plan, fault: Fault) -> dict[int, int]:
    """How far every other rank can get when `fault.rank` does nothing from `fault.place` on.

    A rank waits where it computes with what was not sent, and where others are missing in a collective.
    """
    programs = {rank: what.programs[rank].instructions for rank in range(WORLD)}
    at = {rank: 0 for rank in programs} | {fault.rank: fault.place}
    index = {rank: {i.action: n for n, i in enumerate(program)} for rank, program in programs.items()}

    def passes(rank: int) -> bool:
        pipeline, stage, kind, microbatch = action = programs[rank][at[rank]].action
        if kind in (Kind.F, Kind.B):
            receive = action._replace(kind=Kind.RF if kind is Kind.F else Kind.RB)
            if receive not in index[rank]:
                return True
            sender = programs[rank][index[rank][receive]].peer
            sent = (pipeline, stage + (1 if kind is Kind.B else -1), Kind.SB if kind is Kind.B else Kind.SF, microbatch)
            return at[sender] > index[sender][sent]
        if kind not in (Kind.TE, Kind.ST):
            return True
        # a collective: who died is missing in it even where it died just there
        return all(
            at[other] > n or (at[other] == n and other != fault.rank)
            for other, program in programs.items()
            for n, instruction in enumerate(program)
            if instruction.action.kind is kind and _members(instruction.action) == _members(action)
        )

    moved = True
    while moved:
        moved = False
        for rank in programs:
            while rank != fault.rank and at[rank] < len(programs[rank]) and passes(rank):
                at[rank] += 1
                moved = True
    return {rank: place for rank, place in at.items() if rank != fault.rank}


def _members(action: Action) -> str:
    """Who takes part in a collective: a pipeline's two ends in TE, all pipelines of a model in ST."""
    return action.pipeline if action.kind is Kind.TE else action.pipeline.partition(".")[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"), tied=True)


PLAN = plan(microbatches=2, tied=True, split=("actor",))


def find(kind: Kind, rank: int, nth: int = 0) -> int:
    return [n for n, i in enumerate(PLAN.programs[rank].instructions) if i.action.kind is kind][nth]


def check_killed(folder: Path, models: dict, fault: Fault) -> float:
    """Seconds from the fault to the end of the last rank."""
    run = Run(folder, models, PLAN, fault)
    pid = run.ranks[fault.rank].pid
    seconds = run.wait()
    reached = places_reached(PLAN, fault)
    assert run.ranks[fault.rank].exitcode == -signal.SIGKILL
    for rank, place in reached.items():
        text = run.stderr(rank)
        assert run.ranks[rank].exitcode == 1, text
        line = next(line for line in text.splitlines() if line.startswith("watchdog: "))
        assert line.startswith(f"watchdog: rank {fault.rank} (pid {pid} on ") and " died; last seen in: " in line, text
        check_place(line.partition(f"this is rank {rank}, which was in: ")[2], rank, place)
    report = run.stderr(min(reached))
    for rank in reached:
        if rank != min(reached):
            place = re.search(rf"  rank {rank} \(pid \d+ on \S+\) was in: (.*)", report)
            assert place, report
            check_place(place[1], rank, reached[rank])
            assert "the other ranks:" not in run.stderr(rank)
    return seconds


def check_place(doing: str, rank: int, place: int) -> None:
    """`doing` names the instruction of this rank that the dead one held up, and the receive that it waits for there.

    Or an earlier one: the rank was still computing, or a send or collective that the dead rank had begun did not end.
    """
    seen = _PLACE.fullmatch(doing)
    assert seen, doing
    instructions = PLAN.programs[rank].instructions
    assert str(instructions[int(seen[1])]) == seen[2]
    assert int(seen[1]) <= place, (doing, place)
    receives = [str(i) for i in instructions if i.action.kind in (Kind.RF, Kind.RB)]
    if int(seen[1]) == place and instructions[place].action.kind in (Kind.F, Kind.B):
        assert seen[3] in receives, doing  # which names the peer and the micro-batch


FAULTS = {
    "forward": Fault(2, find(Kind.F, 2, 1)),
    "waiting for a gradient": Fault(1, find(Kind.B, 1), waiting=True),
    "weight gradient": Fault(0, find(Kind.W, 0)),
    "optimizer step": Fault(3, find(Kind.ST, 3)),
}


@pytest.mark.parametrize("case", FAULTS)
def test_every_other_rank_ends_and_says_where_it_waited(tmp_path, models, case):
    check_killed(tmp_path, models, FAULTS[case])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rank", range(WORLD))
def test_a_rank_killed_in_any_instruction(tmp_path, models, rank):
    for place, instruction in enumerate(PLAN.programs[rank].instructions):
        folder = tmp_path / str(place)
        folder.mkdir()
        assert check_killed(folder, models, Fault(rank, place)) < 30


def test_all_kinds_are_among_the_instructions_killed_in():
    kinds = {i.action.kind for program in PLAN.programs.values() for i in program.instructions}
    assert kinds == {Kind.F, Kind.B, Kind.W, Kind.SF, Kind.RF, Kind.SB, Kind.RB, Kind.TE, Kind.RG, Kind.ST}


def test_a_rank_that_raises_is_named_with_its_instruction(tmp_path, models):
    fault = Fault(1, find(Kind.SB, 1), raises=True)
    run = Run(tmp_path, models, PLAN, fault)
    run.wait()
    assert [process.exitcode for process in run.ranks] == [1, 1, 1, 1]
    instruction = PLAN.programs[1].instructions[fault.place]
    assert f"  {fault.place} {instruction}   <-- here" in run.stderr(1) and "watchdog:" not in run.stderr(1)
    for rank in (0, 2, 3):
        text = run.stderr(rank)
        assert "watchdog: rank 1 (pid" in text, text
        assert f"failed with RuntimeError: ValueError: a made-up failure rank 1, instruction {fault.place}:" in text
        assert f"{fault.place} {instruction} <-- here" in text  # the line of the grid, in one line here
        assert f"last seen in: training instruction {fault.place}: {instruction}" in text


def test_a_rank_that_hangs_is_named_by_those_that_wait_for_it(tmp_path, models):
    run = Run(tmp_path, models, PLAN, Fault(2, find(Kind.F, 2, 1), hangs=True))
    pid = run.ranks[2].pid
    assert HANG_SECONDS <= run.wait() < 540
    place = f"rank 2 (pid {pid} on "
    for rank in range(WORLD):
        assert run.ranks[rank].exitcode == 1
        line = next(line for line in run.stderr(rank).splitlines() if line.startswith("watchdog: "))
        assert "no rank made progress for" in line and place in line.partition("; this is rank")[0], line
    assert "waits for" not in line.partition("; this is rank")[0], line
