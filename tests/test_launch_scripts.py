"""The cluster's script binds ranks where that can be; the pages' commands start as many ranks as layouts take."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from testkit.paths import ROOT

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.load import load_config
from rlhfuse.config.values import AUTO
from rlhfuse.decisions.layouts import TASK_ROLES

SBATCH = "scripts/slurm/train.sbatch"
RANKS = re.compile(r"(?:--nproc-per-node|--ranks|--world-size|train_torchrun\.sh)[ =](\d+)\b")
STUBS = {
    "torchrun": 'case "$*" in *--no-python*) exit ${BINDING_FAILS:-0};; esac; echo "torchrun $*"',
    "python": "true",
    "srun": 'case "$1" in --kill*) shift;; esac; exec "$@"',
    "scontrol": "echo node0",
}


@pytest.fixture
def stubs(programs, tmp_path) -> Path:
    """A folder with all that the scripts call: torchrun prints what it is asked for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "head", "true"):
        (folder / name).symlink_to(shutil.which(name) or name)
    for name, line in STUBS.items():
        (folder / name).write_text(f"#!{folder}/bash\n{line}\n")
        (folder / name).chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    return folder


def launched(stubs: Path, script: str, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    slurm = {"SLURM_SUBMIT_DIR": str(stubs.parent), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": "7"}
    command = [str(stubs / "bash"), str(ROOT / script), *args]
    return subprocess.run(
        command, env={"PATH": str(stubs), **slurm, **environ}, capture_output=True, text=True, check=True
    )


def test_ranks_are_bound_to_the_cores_beside_their_gpus_where_they_can_be(stubs):
    done = launched(stubs, SBATCH, "run.yaml", "a=b")
    assert "--nproc-per-node 8 --numa-binding=node " in done.stdout and done.stdout.endswith("run.yaml a=b\n")
    done = launched(stubs, SBATCH, "run.yaml", BINDING_FAILS="1")
    assert "--numa-binding" not in done.stdout and "not bound" in done.stderr and done.stdout.startswith("torchrun ")


def launch_commands() -> list[tuple[str, str, int]]:
    """(command, its configuration in examples/, the ranks that it starts) of every page."""
    per_node = int(re.search(r"--gpus-per-node=(\d+)", (ROOT / SBATCH).read_text())[1])
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for line in page.read_text().replace("\\\n", " ").splitlines():
            config = re.search(r"examples/\w+\.yaml", line)
            nodes = re.search(r"sbatch (?:.*--nodes[ =](\d+) )?.*" + re.escape(SBATCH), line)
            ranks = RANKS.search(line)
            if config and nodes:
                assert nodes[1], f"{page.name}: {line}: say --nodes, the script's own number is of no configuration"
                found.append((line, config[0], int(nodes[1]) * per_node))
            elif config and ranks and "--search" not in line:  # which is for any number
                found.append((line, config[0], int(ranks[1])))
    return found


def test_launch_commands_start_as_many_ranks_as_their_configurations_have():
    commands = launch_commands()
    assert {"llama3_8b_8gpus", "llama3_70b_64gpus", "quickstart"} <= {Path(config).stem for _, config, _ in commands}
    for line, path, ranks in commands:
        overrides = [word for word in shlex.split(line, comments=True) if re.match(r"[a-z_]+(\.[a-z_]+)+=", word)]
        config = load_config(ROOT / path, overrides)
        for task, role in TASK_ROLES:
            if role in config.roles() and (text := getattr(config.parallel, task)) != AUTO:
                assert ParallelLayout.parse(text).size == ranks, f"{line}: parallel.{task}={text} of {path}"
