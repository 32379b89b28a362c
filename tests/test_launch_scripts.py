"""The cluster's script by itself, with what it calls replaced; the pages' commands start as many ranks as layouts take.

Under a real SLURM: tests/slurm.
"""

import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from testkit.paths import ROOT
from testkit.programs import TIMEOUT_SECONDS, eventually

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.load import load_config
from rlhfuse.config.values import AUTO
from rlhfuse.tasks.task import TASKS

SBATCH = "scripts/slurm/train.sbatch"
RANKS = re.compile(r"(?:--nproc-per-node|--ranks|--world-size|train_torchrun\.sh)[ =](\d+)\b")
STUBS = {
    "torchrun": 'case "$*" in *--no-python*) exit ${BINDING_FAILS:-0};; esac; echo "torchrun $*"; eval "${RANKS_DO:-}"',
    "python": 'case "$1" in -c) echo "600 ${FOLDER-}";; *) echo "python $*";; esac',
    "srun": 'while case "$1" in --*) true;; *) false;; esac; do shift; done; exec "$@"',
    "scontrol": 'case "$1" in show) echo node0;; *) echo "scontrol $*"; exit ${REFUSED:-0};; esac',
    "scancel": 'touch "${1#--signal=}"',
}


@pytest.fixture
def stubs(programs, tmp_path):
    """A folder with all that the scripts call: torchrun prints what it is asked for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "env", "head", "mkdir", "rm", "sleep", "stat", "touch", "true"):
        (folder / name).symlink_to(shutil.which(name) or name)
    for name, line in STUBS.items():
        (folder / name).write_text(f"#!{folder}/bash\n{line}\n")
        (folder / name).chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    (tmp_path / "runs").mkdir()
    yield folder
    for notice in ("USR1", "TERM"):  # for ranks that wait for one
        (tmp_path / notice).touch()


def start(stubs: Path, *args: str, **environ: str) -> subprocess.Popen[str]:
    """The script on 2 nodes of 8 GPUs, where nothing else is said."""
    slurm = {"SLURM_SUBMIT_DIR": str(stubs.parent), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": "7"}
    own = {"PATH": str(stubs), **slurm, "SLURM_GPUS_ON_NODE": "8", "RLHFUSE_CACHE": f"{stubs.parent}/cache", **environ}
    command = [str(stubs / "bash"), str(ROOT / SBATCH), "run.yaml", *args]
    return subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(script: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """What it said on both."""
    out, err = script.communicate(timeout=TIMEOUT_SECONDS)
    assert script.returncode == code, (out, err)
    return out, err


def test_ranks_are_bound_to_the_cores_beside_their_gpus_where_they_can_be(stubs):
    out, _ = ended(start(stubs, "a=b"))
    assert "--nproc-per-node 8 --numa-binding=node " in out
    assert out.endswith(" run.yaml trainer.resume=auto a=b trainer.output_dir=runs/run-7\n")
    out, err = ended(start(stubs, BINDING_FAILS="1"))
    assert "--numa-binding" not in out and "not bound" in err
    out, err = ended(start(stubs, SLURM_GPUS_ON_NODE="", RANKS_PER_NODE="3", BINDING_FAILS="1"))
    assert " --nproc-per-node 3 --rdzv" in out and not err


@pytest.mark.parametrize("ranks", ["", "0", "two"])
def test_ranks_are_not_guessed(stubs, ranks):
    out, err = ended(start(stubs, SLURM_GPUS_ON_NODE=ranks), code=2)
    assert out == "" and err.startswith(f"error: RANKS_PER_NODE='{ranks}' is no number of ranks: ")


def test_the_plan_is_that_of_the_job_and_comes_first(stubs):
    out, _ = ended(start(stubs, "trainer.resume=never", FOLDER="runs/mine", SLURM_RESTART_COUNT="1"))
    plan, *_, run = out.splitlines()
    settings = "trainer.resume=auto trainer.resume=never trainer.resume=auto"
    assert plan == f"python tools/train_ppo.py --config run.yaml --dry-run --world-size 16 {settings}"
    assert run.endswith(f" tools/train_ppo.py --config run.yaml {settings}")
    assert "--rdzv-endpoint node0:20007 --rdzv-id 7 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 " in run


def test_its_settings_reach_the_ranks(stubs):
    (stubs.parent / "setup.sh").write_text("export MINE=1; : $UNSET")
    own = {"RLHFUSE_SETUP": "./setup.sh", "RLHFUSE_CONTAINER": "env IN=container", "RENDEZVOUS_PORT": "77"}
    out, _ = ended(start(stubs, **own, RANKS_DO="env", TRITON_CACHE_DIR="there", SLURM_CPUS_PER_TASK="5"))
    words, cache = set(out.split()), stubs.parent / "cache"
    assert {"MINE=1", "IN=container", "TRITON_CACHE_DIR=there", f"NUMBA_CACHE_DIR={cache}/numba"} <= words
    assert {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=660", "SRUN_CPUS_PER_TASK=5", "node0:77"} <= words
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_run_that_can_go_on_is_queued_again(stubs):
    (stubs.parent / "runs/preempted").touch()  # of the start before
    out, _ = ended(start(stubs, FOLDER="runs", RANKS_DO="exit 3"), code=3)
    assert "scontrol" not in out
    own = {"FOLDER": "runs", "RANKS_DO": "touch runs/preempted; exit 3"}
    told = "scontrol requeue 7\njob 7 is queued again, and goes on from runs\n"
    assert ended(start(stubs, **own))[0].endswith(told)
    assert ended(start(stubs, **own, REFUSED="1"), code=3)[0].endswith("scontrol requeue 7\n")


@pytest.mark.parametrize(
    "notices, ranks_do, code, again",
    [
        (["USR1"], "true", 0, True),  # before they could hear it
        (["USR1"], "touch runs/config.yaml", 1, False),  # they could, and left nothing to go on from
        (["USR1", "TERM"], "true", 0, True),
    ],
)
def test_a_notice_is_handed_on_and_the_second_is_an_end(stubs, notices, ranks_do, code, again):
    waits = f"{ranks_do}; touch began; until [ -e {notices[-1]} ]; do sleep 0.02; done; exit 1"
    script = start(stubs, FOLDER="runs", RANKS_DO=waits)
    for before, notice in zip(["began", *notices], notices):
        eventually((stubs.parent / before).exists)
        script.send_signal(signal.SIGUSR1)
        eventually((stubs.parent / notice).exists)
    assert ("scontrol requeue" in ended(script, code)[0]) == again


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
        for task, (role, _) in TASKS.items():
            if role in config.roles() and (text := getattr(config.parallel, task)) != AUTO:
                assert ParallelLayout.parse(text).size == ranks, f"{line}: parallel.{task}={text} of {path}"
