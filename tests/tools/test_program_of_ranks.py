"""An InputError under a launcher: printed once, by rank 0 or by a rank that alone met it. Real ranks, no launcher."""

import os

import pytest
from testkit.own_ranks import OwnRanks
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

pytestmark = pytest.mark.usefixtures("programs")


def work(rank: int, store, folder, meeting: str) -> None:
    import program

    from rlhfuse.base.errors import InputError, RewardError

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": str(rank)}
    os.environ.update(place, TORCHELASTIC_ERROR_FILE=str(folder / f"error{rank}"))
    program.RANK_0_FIRST_SECONDS = 0.2

    def main() -> None:
        if str(rank) in meeting:
            raise InputError("this rank\n has no GPU")
        if meeting == "failure":
            raise RewardError(f"sample {rank} has no score")

    def prints(what: str, seconds: float) -> bool:  # who meets it with rank 0 waits for that, however late it is
        return program.prints_error(what, 540.0 if seconds and "0" in meeting else seconds)

    program.run_program(main, tear_down=False, prints=prints)


def errors_of(folder, world: int, meeting: str) -> tuple[list[int | None], list[str]]:
    """Exit codes, and the lines that begin with "error: "."""
    with OwnRanks(world, folder, work, meeting) as running:
        codes = running.exit_codes()
        text = "\n".join(running.texts)
    assert "Traceback" not in text
    return codes, [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    "meeting, said",
    [
        ("012", ["error: this rank has no GPU"]),
        ("2", ["error: rank 2: this rank has no GPU"]),
        ("12", [f"error: rank {rank}: this rank has no GPU" for rank in "12"]),
    ],
)
def test_an_input_error_is_printed_once_by_a_rank_that_met_it(tmp_path, meeting, said):
    codes, lines = errors_of(tmp_path, 3, meeting)
    assert codes == [2 if rank in meeting else 0 for rank in "012"]
    assert len(lines) == 1 and lines[0] in said, lines


def test_failures_of_several_ranks_are_one_line_and_all_stand_in_torchruns_files(tmp_path):
    codes, lines = errors_of(tmp_path, 2, "failure")
    assert codes == [1, 1] and len(lines) == 1, lines
    failures = {rank: ProcessFailure(rank, 1, 1, str(tmp_path / f"error{rank}")) for rank in (0, 1)}
    failures[2] = ProcessFailure(2, 1, -9, "")  # killed: torchrun's own words, of the moment when it noticed
    table = ChildFailedError("job", failures).format_msg().splitlines()
    assert table[-2] in [f"  traceback : error: sample {rank} has no score" for rank in (0, 1)], table
