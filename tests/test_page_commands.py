"""Every command of README, tutorial and how-to pages, run as printed in a fresh folder; or why it is not.

Commands of a page are its fenced and indented blocks of shell, and inline code that begins with a program. Programs of
the project run in this process; what a command needs (a run.yaml, a finished run in runs/mine, ...) is there.
"""

import math
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from testkit.paths import ROOT
from testkit.programs import MPIRUN, call_tool
from testkit.tiny import write_run

from rlhfuse.monitor.metrics import read_metrics

PAGES = ("README.md", "docs/tutorial.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/howto/*.md")))
PROGRAMS = r"(?:python3?|bash|sh|torchrun|mpirun|srun|sbatch|pip|git|tensorboard|rlhfuse-\w+|\.)"
SHELL = re.compile(rf"""(?:[A-Z_]+=(?:"[^"]*"|\S)+ )*{PROGRAMS} \S""")
INSTALLED = {  # the programs of pyproject.toml
    "rlhfuse-train": "train_ppo",
    "rlhfuse-plan": "plan",
    "rlhfuse-search": "search_schedule",
    "rlhfuse-calibrate": "calibrate_threshold",
    "rlhfuse-report": "report",
    "rlhfuse-check": "gpu_check",
    "rlhfuse-compare": "compare_runs",
}
MEANT = {  # what stands for something of the reader's, or is large -> what it is here
    "[key=value ...]": "",
    "FILE[:COLUMN]": "lengths.csv:output",
    "--config run.yaml --lengths RUN_DIR": "--config my_run.yaml --lengths runs/mine",
    "--config run.yaml fusion.threshold_file=": "--config my_run.yaml fusion.threshold_file=",
    "RUN_DIR": "runs/mine",
    "RUN_A": "runs/mine",
    "RUN_B": "runs/serial",
    "RUN": "runs/mine",
    "past_lengths.jsonl": "lengths.csv:output",
    "runs/past": "runs/mine",
    "rlhfuse.data.NAME:function": "my_reward.py:short_and_glad",
    "runs/fused": "runs/mine",
    "iteration-20": "iteration-1",
    "--world-size 8": "--world-size 2",
    "--world-size 64": "--world-size 2",
    "train_torchrun.sh 8": "train_torchrun.sh 2",
    "search_schedule.sh 8": "search_schedule.sh 2",
    "--time-limit 600": "--time-limit 3",
    "--time-limit 20": "--time-limit 2",
    "--nodes 0-7": "--nodes 0-1",
    "actor=d1t1p8,critic=d2t1p4": "actor=d1t1p2,critic=d2t1p1",
    "--config large.yaml": "--config run.yaml",
    "--config tiny.yaml": "--config run.yaml rollout.draft_rows=0",
}
# The first that matches says how a command is treated: run, dry-run, or why it is not.
RUN, DRY = "run", "dry run"
WAYS = {
    r"(\S+ )*bash scripts/quickstart\.sh|bash scripts/test\.sh": "installs and trains: CI's first two lines",
    r"\. \.venv/bin/activate|\. scripts/setup\.sh && setup|git ": "the environment that these tests run in",
    r"(\S+ )*pip |python3? -m venv ": "installs: tests/test_metadata.py",
    r"(gpu_check|bash scripts/gpu_check\.sh)\b|.*measured:": "a GPU's: tests/tools/gpu_checks/test_gpu_check.py",
    r".*(llama3_|trainer\.device=cuda)": "a GPU's, with models that are not here: tests/planning/test_efficiency.py",
    r"(sbatch|srun|scancel|scontrol) ": "SLURM's: tests/slurm",
    r"tensorboard |torchrun --numa-binding=node$": "not the project's program",
    r"torchrun .*profile_costs ": "measures for minutes: tests/tools/cost_profiles",
    r"rehearse ": "compiles C++ and runs whole iterations: tests/tools/rehearsal",
    r"GLOO_SOCKET_IFNAME=\S+ torchrun --nnodes ": "on several machines: tests/run/test_two_machines.py",
    r"mpirun ": "on several ranks: tests/tools/test_search_schedule.py",
    r"calibrate_threshold .*--trial": "generates for a while: tests/tools/test_calibrate_threshold.py",
    r"((torchrun .*)?train_ppo|bash scripts/train_torchrun\.sh) ": DRY,
    r"(plan|calibrate_threshold|search_schedule|show_\w+|report|compare_runs|convert_checkpoint) ": RUN,
    r"bash scripts/search_schedule\.sh \d": RUN,
}


def commands(text: str) -> list[str]:
    """What a page tells to type, in its order; comments are left out and continued lines joined.

    Inline code is a command if it has an argument beside the program.
    """
    found, language = [], None  # of the fenced block that the line is in
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            language = line[3:].strip() if language is None else None
        elif language in ("", "bash", "sh", "console") or language is None and line.startswith("    "):
            found.append(line.strip())
        elif language is None:
            found += [code for code in line.split("`")[1::2] if not re.fullmatch(r"python3? \S+", code)]
    plain_lines = (re.sub(r"\s+", " ", re.sub(r"\s+# .*", "", line)) for line in found)
    return [line for line in plain_lines if SHELL.match(line) and not line.endswith("...")]


def plain(command: str) -> str:
    """With the programs of the project by the names of their files."""
    command = re.sub(r"\brlhfuse-\w+", lambda match: INSTALLED.get(match[0], match[0]), command)
    return re.sub(r"(?:python )?tools/(\w+)\.py|(?:python )?-m rlhfuse\.tools\.(\w+)", r"\1\2", command)


def way(command: str) -> str:
    """How a command is treated; '' if nobody has said."""
    return next((how for pattern, how in WAYS.items() if re.match(pattern, plain(command))), "")


ALL = [(page, command) for page in PAGES for command in commands((ROOT / page).read_text())]


def test_it_is_known_of_every_command_how_it_is_tried():
    unknown = [f"{page}: {command!r} is new: say in WAYS how it is tried" for page, command in ALL if not way(command)]
    assert not unknown, "\n".join(unknown)
    assert {page for page, _ in ALL} >= {"README.md", "docs/tutorial.md", "docs/howto/schedules.md"}


def test_commands_are_read_as_one_types_them():
    page = "`python tools/x.py` or `python tools/x.py RUN`\n\n```python\nf()\n```\n\n    bash c.sh\n"
    fenced = "```\nA=1 torchrun a \\\n b=1   # why\nno\n```\n"
    assert commands(page + fenced) == ["python tools/x.py RUN", "bash c.sh", "A=1 torchrun a b=1"]


@pytest.fixture(scope="module")
def world(tmp_path_factory, pools):
    """The folder of this process: examples, the tutorial's files as printed, its run and the serial one, a run.yaml."""
    folder, before = tmp_path_factory.mktemp("a folder"), os.getcwd()
    for name in ("examples", "tools", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    write_run(folder, trainer__output_dir="runs/new", rollout__max_response_tokens=8)
    tutorial = (ROOT / "docs/tutorial.md").read_text()
    for name, language in (("my_reward.py", "python"), ("my_run.yaml", "yaml")):
        (text,) = re.findall(rf"`{name}`:\n\n```{language}\n(.*?)```", tutorial, re.S)
        (folder / name).write_text(text)
    (folder / "lengths.csv").write_text("prompt,output\n" + "".join(f"5,{3 + n % 5}\n" for n in range(64)))
    os.chdir(folder)
    pool = pools.of(2)
    for run, more in (("mine", ("trainer.save_every=1",)), ("serial", SERIAL)):
        pool.run(train, folder, (*SHORT, f"trainer.output_dir=runs/{run}", *more))
    pool.kill()  # its ranks have another folder, and children
    yield folder
    os.chdir(before)


SHORT = "trainer.iterations=2", "rollout.max_response_tokens=16", "fusion.search_seconds=0.2"
SERIAL = "fusion.inter_stage=false", "fusion.intra_stage=false"


def train(rank: int, folder: Path, overrides: tuple[str, ...]) -> None:
    """A rank of the tutorial's training."""
    import multiprocessing

    import torch.distributed as dist

    from rlhfuse.config.load import load_config
    from rlhfuse.monitor.guard import Guard
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.run.launch import joint_inputs, run_job

    multiprocessing.current_process()._config["daemon"] = False  # a daemon may not start the reward's processes
    os.chdir(folder)
    config = load_config("my_run.yaml", overrides)
    with Guard(rank, 540) as guard:
        store = dist.PrefixStore(config.trainer.output_dir, dist.distributed_c10d._get_default_store())
        run_job(
            joint_inputs(config, store, rank, 2), config.trainer.output_dir, rank, choose_device("cpu", 0, 1), guard
        )


def here(command: str) -> str:
    """As it is run: with what it stands for in the place of what is the reader's."""
    for meant, given in MEANT.items():
        command = command.replace(meant, given)
    return plain(command)


TRIED: dict[str, str] = {}  # command -> the first page that has it, in the pages' order
for page, command in ALL:
    if way(command) in (RUN, DRY):
        TRIED.setdefault(here(command), page)


@pytest.mark.parametrize("command, page", TRIED.items())
def test_a_command_runs_as_it_is_printed(programs, world, command, page):
    """In the pages' order, for one may need what those before it wrote; what stands twice once."""
    words = shlex.split(command)
    if way(command) == DRY:
        words = dry(words)
    if "--out" in words:
        out = world / words[words.index("--out") + 1]
        shutil.rmtree(out, ignore_errors=True)  # a folder
        out.unlink(missing_ok=True)
    if words[0] == "bash":
        if not MPIRUN.exists():
            pytest.skip("no mpirun beside this Python: pip install rlhfuse[mpi]")
        beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = programs.run(*words, cwd=world, PATH=beside)
    else:
        done = call_tool(*words)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_tutorials_run_learns(world, pools):
    """Its score rises by more than three standard errors of the first and the last iteration's samples."""
    pool = pools.of(2)
    pool.run(train, world, ("trainer.output_dir=runs/whole",))
    pool.kill()
    first, *_, last = read_metrics(world / "runs/whole/metrics.jsonl")
    samples = len(first["lengths/output"])
    error = math.hypot(*(row["critic/score/std"] for row in (first, last))) / samples**0.5
    assert samples == 64 and last["critic/score/mean"] - first["critic/score/mean"] > 3 * error


def dry(words: list[str]) -> list[str]:
    """Training's command as a dry run for as many ranks."""
    if words[0] == "bash":
        words = ["train_ppo", "--ranks", words[2], "--config", *words[3:]]
    arguments = [word for word in words[words.index("train_ppo") + 1 :] if word != "--dry-run"]
    return ["train_ppo", "--dry-run", *arguments, "trainer.output_dir=runs/new", "fusion.search_seconds=0.2"]
