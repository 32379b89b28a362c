"""A launcher that is killed takes along its ranks, their workers, and what these have started, at any moment."""

import os
import sys
from pathlib import Path

import psutil
import pytest
from testkit.paths import ROOT
from testkit.programs import eventually, ranks_of
from testkit.tiny import write_run

TRAIN = ROOT / "tools" / "train_ppo.py"
LAUNCHERS = {
    "--ranks": (sys.executable, TRAIN, "--ranks", 2),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, TRAIN),
}
REWARD = '''
import re, subprocess
from pathlib import Path

def holds_the_interpreter(completions):
    """Starts a program in a session of its own, and never lets another thread run again."""
    program = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(Path(__file__).with_name("started"), "a") as file:
        file.write(f"{program.pid}\\n")
    re.match("(a+)+$", "a" * 99 + "b")
'''


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def semaphores(process: psutil.Process) -> set[Path]:
    """Files of named semaphores that a process has open."""
    return {Path(one.path) for one in process.memory_maps() if one.path.startswith("/dev/shm/sem.")}


def kill(launcher) -> None:
    launcher.kill()
    launcher.wait()


@pytest.mark.parametrize("words", LAUNCHERS.values(), ids=LAUNCHERS)
def test_ranks_end_that_have_not_begun(programs, tmp_path, words):
    """They are held up before their first import until the launcher is gone."""
    launcher = programs.start(*words, "--config", write_run(tmp_path))
    held = []
    while len(held) < 2:
        eventually(lambda: len(ranks_of(launcher.pid)) > len(held))
        held = [psutil.Process(pid) for pid in ranks_of(launcher.pid).values()]
        for rank in held:
            rank.suspend()
    kill(launcher)
    for rank in held:
        rank.resume()
    eventually(lambda: not alive(held), lambda: f"{alive(held)} outlived the launcher")


def test_all_that_a_run_has_started_ends_with_its_launcher(programs, tmp_path):
    """Also where the reward function does not let its worker hear of it; what the kernel shares is given back."""
    (tmp_path / "reward.py").write_text(REWARD)
    reward = f"reward.function={tmp_path / 'reward.py'}:holds_the_interpreter"
    config = write_run(tmp_path, algorithm__name="grpo", reward__path="")
    words = "--no-try-reward", "--config", config, reward, "reward.workers=1"
    launcher, started = programs.start(*LAUNCHERS["--ranks"], *words), tmp_path / "started"
    eventually(lambda: started.exists() and len(started.read_text().split()) == 2, launcher.poll)
    family = psutil.Process(launcher.pid).children(recursive=True)
    shared = set().union(*(semaphores(psutil.Process(pid)) for pid in ranks_of(launcher.pid).values()))
    assert {int(pid) for pid in started.read_text().split()} < {one.pid for one in family}
    kill(launcher)
    eventually(lambda: not alive(family), lambda: f"{alive(family)} outlived the launcher")
    assert not any(map(os.path.exists, shared))
