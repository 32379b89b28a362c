"""A rank that dies or raises in any instruction of training: every other rank ends and says where it was.

Real processes under the watchdog. The fault is set off by the test's own progress function, which the executor calls
before each instruction and before each wait. Where the others must end up is worked out from the programs alone.
"""

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from testkit.own_ranks import OwnRanks, StoodClock
from testkit.training_pair import Plan, build_pair, write_pair

from rlhfuse.monitor.heartbeat import Limits
from rlhfuse.schedule.ir.action import Action, Kind

pytestmark = pytest.mark.usefixtures("programs")
WORLD = 4
STEP = 1  # the fault comes in the second step
PLAN = Plan(microbatches=2, split=("actor",), tied=True)
PROGRAMS = {rank: PLAN.programs[rank].instructions for rank in range(WORLD)}
_PLACE = re.compile(r"training instruction (\d+): (\S+)(?: waits (?:for|until) (.+))?")


@dataclass(frozen=True)
class Fault:
    """`rank` is killed (or raises, or hangs) as it comes to the instruction at `place`, or as it waits there."""

    rank: int
    place: int
    waiting: bool = False
    raises: bool = False
    hangs: bool = False


def work(rank: int, store, folder: Path, models: dict, fault: Fault) -> None:
    import torch.distributed as dist

    from rlhfuse.monitor import watchdog as module
    from rlhfuse.monitor.guard import Guard

    number, struck = 0, folder / "struck"

    def progress(text: str) -> None:
        watchdog.progress(text)
        seen = _PLACE.fullmatch(text)
        if number == STEP and seen:
            (folder / f"begun{rank}").touch()
        if number == STEP and rank == fault.rank and seen and int(seen[1]) == fault.place:
            if bool(seen[3]) == fault.waiting:
                while len(list(folder.glob("begun*"))) < WORLD:  # who has not would tell of the step before
                    time.sleep(0.01)
                struck.touch()
                if fault.raises:
                    raise ValueError("a made-up failure")
                while fault.hangs:
                    time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)

    pair = build_pair(rank, models, PLAN, progress=progress)
    module.time = StoodClock(struck.exists)  # silence before the fault is a busy machine's
    limits = Limits(hang_seconds=3 if fault.hangs else 3600, interval_seconds=0.2)
    with Guard(rank, 540) as guard, module.Watchdog(store, rank, WORLD, limits, guard) as watchdog:
        for number in range(STEP + 2):
            dist.barrier()  # so that nobody is still in the step before
            pair.train(number)
        dist.barrier()


def run(folder: Path, models: dict, fault: Fault) -> tuple[list[int | None], list[str], int | None]:
    """Exit codes of four ranks that train until the fault, what they wrote, and the pid of the one at fault."""
    with OwnRanks(WORLD, folder, work, models, fault) as running:
        codes = running.exit_codes()
        assert (folder / "struck").exists(), "the fault was never reached:\n" + running.texts[0]
        return codes, running.texts, running.ranks[fault.rank].pid


def places_reached(fault: Fault) -> dict[int, int]:
    """How far every other rank can get when `fault.rank` does nothing from `fault.place` on.

    A rank waits where it computes with what was not sent, and where others are missing in a collective.
    """
    programs = PROGRAMS
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
    return write_pair(tmp_path_factory.mktemp("models"), actor={"tie_word_embeddings": True})


def find(kind: Kind, rank: int, nth: int = 0) -> int:
    return [n for n, i in enumerate(PROGRAMS[rank]) if i.action.kind is kind][nth]


def check_killed(folder: Path, models: dict, fault: Fault) -> None:
    codes, texts, pid = run(folder, models, fault)
    reached = places_reached(fault)
    assert codes[fault.rank] == -signal.SIGKILL
    for rank, place in reached.items():
        assert codes[rank] == 1, texts[rank]
        line = next(line for line in texts[rank].splitlines() if line.startswith("watchdog: "))
        dead = f"watchdog: rank {fault.rank} (pid {pid} on "
        assert line.startswith(dead) and " died; last seen in: " in line, texts[rank]
        check_place(line.partition(f"this is rank {rank}, which was in: ")[2], rank, place)
    report = texts[min(reached)]
    for rank in reached:
        if rank != min(reached):
            place = re.search(rf"  rank {rank} \(pid \d+ on \S+\) was in: (.*)", report)
            assert place, report
            check_place(place[1], rank, reached[rank])
            assert "the other ranks:" not in texts[rank]


def check_place(doing: str, rank: int, place: int) -> None:
    """`doing` names the instruction of this rank that the dead one held up, and the receive that it waits for there.

    Or an earlier one: the rank was still computing, or a send or collective that the dead rank had begun did not end.
    """
    seen = _PLACE.fullmatch(doing)
    assert seen, doing
    instructions = PROGRAMS[rank]
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
    for place in range(len(PROGRAMS[rank])):
        folder = tmp_path / str(place)
        folder.mkdir()
        check_killed(folder, models, Fault(rank, place))


def test_all_kinds_are_among_the_instructions_killed_in():
    kinds = {i.action.kind for program in PROGRAMS.values() for i in program}
    assert kinds == {Kind.F, Kind.B, Kind.W, Kind.SF, Kind.RF, Kind.SB, Kind.RB, Kind.TE, Kind.RG, Kind.ST}


def test_a_rank_that_raises_is_named_with_its_instruction(tmp_path, models):
    fault = Fault(1, find(Kind.SB, 1), raises=True)
    codes, texts, _ = run(tmp_path, models, fault)
    assert codes == [1, 1, 1, 1]
    instruction = PROGRAMS[1][fault.place]
    assert f"  {fault.place} {instruction}   <-- here" in texts[1] and "watchdog:" not in texts[1]
    for rank in (0, 2, 3):
        text = texts[rank]
        assert "watchdog: rank 1 (pid" in text, text
        assert f"failed with RuntimeError: ValueError: a made-up failure rank 1, instruction {fault.place}:" in text
        assert f"{fault.place} {instruction} <-- here" in text  # the line of the grid, in one line here
        assert f"last seen in: training instruction {fault.place}: {instruction}" in text


def test_a_rank_that_hangs_is_named_by_those_that_wait_for_it(tmp_path, models):
    codes, texts, pid = run(tmp_path, models, Fault(2, find(Kind.F, 2, 1), hangs=True))
    assert codes == [1, 1, 1, 1]
    for text in texts:
        line = next(line for line in text.splitlines() if line.startswith("watchdog: "))
        named = line.partition("; this is rank")[0]
        assert "no rank made progress for" in line and f"rank 2 (pid {pid} on " in named, line
    assert "waits for" not in named, line
    assert sum("the other ranks:" in text for text in texts) == 1
