"""Hours of work that no other tier does: very many simulated lives, the shipped examples in every combination of what
meets in generation, and ends at random moments. Run it as `scripts/test.sh --all tests/soak`.
"""

import gc
import json
import os
import random
import signal
import time
from contextlib import suppress
from itertools import product
from subprocess import Popen

import psutil
import pytest
from testkit.paths import ROOT
from testkit.programs import call_tool, ended, eventually, left_of
from testkit.world.life import live

pytestmark = pytest.mark.slow
LIVES, PARTS, ITERATIONS, ENDS = 200_000, 40, 60, 100
REWARD = """import os, time
from rlhfuse.data.gsm8k import answer_match
def slow(completions, answer, **columns):
    time.sleep(0.3 * (int.from_bytes(os.urandom(1), "little") < 24))
    return answer_match(completions, answer)
"""
SMALL = (
    "rollout.prompts_per_iteration=8 trainer.hang_seconds=90 trainer.watchdog_seconds=30 reward.timeout_seconds=20 "
    "fusion.search_seconds=1 trainer.eval_before_train=false trainer.export=false"
).split()
SIGNALS = dict(k=[signal.SIGKILL], s=[signal.SIGSTOP, signal.SIGCONT], t=[signal.SIGTERM], i=[signal.SIGINT])
FILTERED = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=4")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_lives(tmp_path, part):
    gc.collect()
    gc.freeze()
    for seed in range(part * LIVES // PARTS, (part + 1) * LIVES // PARTS):
        live(seed, tmp_path)
    gc.unfreeze()


@pytest.fixture
def slow_reward(tmp_path) -> str:
    (tmp_path / "rewards.py").write_text(REWARD)
    return f"reward.function={tmp_path}/rewards.py:slow"


COMBINATIONS = [*product((False, True), ("sums", "calculator"), (0, 3, 6, 32, 64), (2, 4), (False, True))]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("filtered, example, threshold, ranks, slow", COMBINATIONS)
def test_an_example_ends(programs, tmp_path, slow_reward, filtered, example, threshold, ranks, slow):
    settings = [f"trainer.iterations={ITERATIONS}", "trainer.eval_every=0", f"trainer.output_dir={tmp_path}/run"]
    settings += [f"fusion.threshold={threshold}", "data.val_files=[]", *SMALL, *(FILTERED if filtered else ())]
    settings += [f"parallel.{task}=d{ranks}t1p1" for task in ("actor_train", "generation")]
    config = ROOT / "examples" / f"{example}_grpo.yaml"
    programs.trained(config, *settings, *([slow_reward] if slow else ()), ranks=ranks)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == ITERATIONS


class Ends:
    """Signals for a run: to its launcher, a rank, a worker of rewards or tools, or all of them."""

    def __init__(self, seed: int) -> None:
        self._dice, self.met = random.Random(seed), []

    def strike(self, launcher: Popen[str]) -> None:
        """One signal at a random moment, which a run may have finished before."""
        moment, whom, how = self._dice.uniform(0.3, 12), self._dice.choice("LRWA"), self._dice.choice("kksti")
        until = time.monotonic() + moment
        while launcher.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        if launcher.poll() is not None:
            return
        torchrun = psutil.Process(launcher.pid)
        everyone = [torchrun, *torchrun.children(recursive=True)]
        kinds = {"L": everyone[:1], "A": everyone}
        for one in everyone[1:]:
            with suppress(psutil.NoSuchProcess):
                kinds.setdefault("R" if "train_ppo" in " ".join(one.cmdline()) else "W", []).append(one)
        victims = kinds.get(whom) or everyone
        victims = victims if whom == "A" else [self._dice.choice(victims)]
        self.met.append(f"{whom}{how} after {moment:.1f} s")
        for number in SIGNALS[how]:
            for victim in victims:
                if victim.is_running():
                    victim.send_signal(number)
            time.sleep(self._dice.uniform(0.1, 3) if number == signal.SIGSTOP else 0)


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("example", ("sums", "calculator"))
def test_a_run_that_is_ended_again_and_again_has_the_bits_of_one_that_is_not(programs, tmp_path, example):
    """What is killed, stopped or continued at random moments goes on by the same command, and leaves nothing behind."""
    settings = ["trainer.iterations=40", "trainer.eval_every=7", "trainer.save_every=3", "trainer.resume=auto"]
    settings += [*SMALL, *FILTERED, "fusion.threshold=3", "trainer.export=true"]
    config, ends, number, before = ROOT / "examples" / f"{example}_grpo.yaml", Ends(7), 0, set(os.listdir("/dev/shm"))
    programs.trained(config, *settings, f"trainer.output_dir={tmp_path}/whole")
    while len(ends.met) < ENDS // 2:
        folder, number = tmp_path / f"run-{number}", number + 1
        while not (folder / "finished.json").exists():
            launcher = programs.train(config, *settings, f"trainer.output_dir={folder}")
            ends.strike(launcher)
            ended(launcher)
            eventually(lambda: not left_of(folder), lambda: left_of(folder))
        found = call_tool("compare_runs", tmp_path / "whole", folder)
        assert found.returncode == 0, (ends.met, found.stdout)
    assert set(os.listdir("/dev/shm")) <= before, ends.met
    print(json.dumps(ends.met))
