"""The scripts beside training under a real SLURM: one search on two nodes, none by srun alone, arrays."""

import json
import sys
from pathlib import Path

import pytest
from testkit.finished_run import write_config
from testkit.paths import ROOT
from testkit.programs import MPIRUN

pytestmark = pytest.mark.slurm
FORWARD = dict(model="actor", microbatches=4, forward=5, backward=10, activation=1)
BACK = {**FORWARD, "model": "critic", "name": "critic", "placement": [1, 0]}
PROBLEM = {"version": 1, "nodes": 2, "pipelines": [{**FORWARD, "name": "actor", "placement": [0, 1]}, BACK]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "problem.json").write_text(json.dumps(PROBLEM))
    (tmp_path / "setup.sh").write_text(f"export PATH={Path(sys.executable).parent}:$PATH\n")
    return tmp_path


def submitted(slurm, folder: Path, script: str, *words: object, options: tuple = ()) -> str:
    """Run a script to its end; returns what it said."""
    words = (*options, f"--output={folder}/%j.out", ROOT / "scripts/slurm" / script, *words)
    number = slurm.submit(*words, RLHFUSE_SETUP=f"{folder}/setup.sh")
    ended, said = slurm.ended(number), "".join(file.read_text() for file in sorted(folder.glob("*.out")))
    assert ended["ExitCode"] == "0:0", said
    return said


@pytest.mark.mpi
@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python: pip install rlhfuse[mpi]")
def test_ranks_on_both_nodes_search_together_and_those_of_srun_alone_are_refused(slurm, folder):
    out, nodes = folder / "schedule.json", ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1")
    options = (folder / "problem.json", out, "--iterations", 100_000, "--objective", "memory")
    said = submitted(slurm, folder, "search_schedule.sbatch", *options, options=nodes)
    assert said.count("(2 ranks)") == 1 and json.loads(out.read_text())["search"]["ranks"] == 2
    before = out.read_bytes()
    tool = ("python", ROOT / "tools/search_schedule.py", "--problem", options[0], "--out", out, "--force")
    path = {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"}
    refused = slurm.run("srun", *nodes, *tool, "--iterations", 1, **path)
    assert refused.returncode == 2 and "2 processes were started" in refused.stderr, refused
    assert out.read_bytes() == before


def test_an_array_chooses_a_threshold_by_each_line(slurm, folder):
    config, lines = write_config(folder / "run/config.yaml", ""), []
    for name in ("long tail", "short"):
        lengths = [900 if name[0] == "l" and number % 20 == 0 else 90 + number % 20 for number in range(100)]
        (folder / f"{name}.csv").write_text("output_tokens\n" + "".join(f"{one}\n" for one in lengths))
        lines.append(f"--config {config} --lengths '{folder}/{name}.csv' --out '{folder}/{name}.json'\n")
    (folder / "lines").write_text("".join(lines))
    words = ("calibrate_threshold.sbatch", folder / "lines", "trainer.hardware=h100")
    submitted(slurm, folder, *words, options=("--array=1-2",))
    chosen = [json.loads((folder / f"{name}.json").read_text()) for name in ("long tail", "short")]
    assert chosen[0]["lengths"]["max"] > chosen[1]["lengths"]["max"]
