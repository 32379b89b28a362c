"""An InputError under a launcher: printed once, by rank 0 or by a rank that alone met it. Real ranks, no launcher."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from testkit.workers import host_store
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

PROGRAM = """
import os, time
import rlhfuse.base.errors as errors
errors.RANK_0_FIRST_SECONDS = 2.0
from rlhfuse.parallel.first_error import prints_error

def main():
    if os.environ["RANK"] in os.environ["MEET_IT"]:
        raise errors.InputError("this rank\\n has no GPU")
    if "failure" in os.environ["MEET_IT"]:
        time.sleep(int(os.environ["RANK"]) / 2)
        raise errors.RewardError(f"sample {os.environ['RANK']} has no score")

errors.run_program(main, tear_down=False, prints=prints_error)
"""


@pytest.mark.parametrize(
    "meeting, said",
    [("012", ["error: this rank has no GPU"]), ("2", ["error: rank 2: this rank has no GPU"]), ("12", None)],
)
def test_an_input_error_is_printed_once_by_a_rank_that_met_it(meeting, said):
    store = host_store()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "MEET_IT": meeting}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, env=os.environ | place | {"RANK": rank}
        )
        for rank in "012"
    ]
    lines = [line for process in ranks for line in process.communicate(timeout=300)[1].splitlines()]
    assert [process.returncode for process in ranks] == [2 if rank in meeting else 0 for rank in "012"]
    found = [line for line in lines if line.startswith("error: ")]
    assert found == said or (said is None and len(found) == 1 and found[0][:12] in ("error: rank ",)), lines


def test_failures_of_several_ranks_are_one_line_and_all_stand_in_torchruns_files(tmp_path):
    store = host_store()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "MEET_IT": "failure"}
    ranks = []
    for rank in "01":
        environment = os.environ | place | {"RANK": rank, "TORCHELASTIC_ERROR_FILE": str(tmp_path / rank)}
        ranks.append(
            subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, env=environment)
        )
    lines = [line for process in ranks for line in process.communicate(timeout=300)[1].splitlines()]
    assert [process.returncode for process in ranks] == [1, 1] and len(lines) == 1, lines
    failures = {rank: ProcessFailure(rank, 1, 1, str(tmp_path / str(rank))) for rank in (0, 1)}
    failures[2] = ProcessFailure(2, 1, -9, "")  # killed: torchrun's own words, of the moment when it noticed
    table = ChildFailedError("job", failures).format_msg().splitlines()
    assert table[-2] in [f"  traceback : error: sample {rank} has no score" for rank in (0, 1)], table
