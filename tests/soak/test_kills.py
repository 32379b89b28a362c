"""Ends at random moments of a run that saves and evaluates: nothing is lost beside the run that was left alone.

Each end waits for a kind of work, in turn, in an iteration drawn from all, and a moment longer. A kill is SIGKILL for
all ranks with what they started, in half of them for torchrun too; a stop is SIGINT and a preemption SIGUSR1 for
torchrun, in half of them twice. An iteration that a single signal did not let end is lost too.
"""

import json
import random
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import psutil
import pytest
from run_comparison import EXPORTS, compare_exports, compare_metrics
from testkit.machines import machines
from testkit.paths import ROOT
from testkit.programs import ended, eventually, left_of
from told_training import BEGINS, WIDTH

from rlhfuse.run.checkpoint.checkpoint import checkpoints_in

TOLD = Path(__file__).with_name("told_training.py")
LAUNCHER = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout", "630")
HOW = {"kill": signal.SIGKILL, "stop": signal.SIGINT, "preempt": signal.SIGUSR1}
ENDS, ITERATIONS, EXPORT = 20, 10, 1 << 30  # the last: the iteration that exporting counts as
MOST_SECONDS = 1800.0  # of a run: of a hang alone
KINDS = {  # of work, by the words of it, and the seconds that an end may come later
    "start-up": ("", 10.0),
    "export": ("exporting", 0.02),
    "evaluation": ("evaluat", 0.5),
    "tool": ("wait for tools|tool .* of sample", 0.3),
    "generation": ("generation|_move", 0.2),
    "inference": ("inference: [^w]|inter-stage", 0.1),
    "reward": ("reward function", 0.3),
    "training": ("_train|actor:|critic:", 0.3),
    "saving": ("", 0.02),
}
FUNCTIONS = '''import random, time
def slow(completion_ids):
    time.sleep(0.05)
    return [float(len(set(ids))) for ids in completion_ids]
def calc(a: int, sign: str, b: int) -> str:
    """Add or subtract.

    Args:
        a: The first number.
        sign: + or -.
        b: The second number.
    """
    time.sleep(random.SystemRandom().random() * 0.6)
    return str(a + b if sign == "+" else a - b)
'''
SETTINGS = """rollout.prompts_per_iteration=4 rollout.max_sequences_per_instance=3 fusion.least_threshold=4
    fusion.bs_max=4 reward.signature=trl trainer.save_every=1 trainer.resume=auto trainer.eval_every=2
    trainer.eval_before_train=true trainer.keep_best=true"""
OF_EXAMPLE = {  # and the file of prompts that it evaluates
    "quickstart": """quickstart rollout.max_response_tokens=48 algorithm.minibatches=2 fusion.actor_microbatches=2
        fusion.search_seconds=0.3 parallel.actor_train=d1t1p2 parallel.critic_train=d2t1p1
        parallel.generation=d2t1p1 parallel.inference=d2t1p1 reward.function={}:slow""",
    "calculator_grpo": """calculator_train rollout.samples_per_prompt=4 eval.samples_per_prompt=1
        rollout.multi_turn.function_tool_path={}""",
}


@dataclass
class End:
    """Waits for a kind of work in an iteration, or for a later one, and `seconds` more; then it ends the run."""

    folder: Path
    kind: str
    iteration: int
    seconds: float
    how: str
    more: float  # 0, or the seconds to a second signal; of a kill, that torchrun dies too
    found: tuple[int, str] = (-1, "")  # iteration and kind of work that was ended

    @property
    def completes(self) -> int:
        """Iterations that are done and saved afterwards, because they were under way."""
        number, kind = self.found
        return number + 1 if self.how != "kill" and not self.more and kind not in ("export", "start-up") else 0

    @property
    def is_noted(self) -> bool | None:
        """Whether the run's folder is to say that the run goes on; None where both may be."""
        finished = (self.folder / "finished.json").exists()
        return None if self.found[1] in ("", "start-up") else self.how == "preempt" and not finished

    def wait(self, launchers: list[Popen]) -> None:
        while not self.found[1] and all(one.poll() is None for one in launchers):
            iteration, kind = self._look()
            here = kind == self.kind and (iteration == self.iteration or kind == "start-up")
            if here or iteration > self.iteration:
                time.sleep(self.seconds)
                self.found = self._look()
                torchruns = [psutil.Process(one.pid) for one in launchers if one.poll() is None]
                below = [one for torchrun in torchruns for one in torchrun.children(recursive=True)]
                if self.how == "kill":
                    self._send([*torchruns, *below][0 if self.more else len(torchruns) :])
                else:
                    self._send(torchruns)
                    time.sleep(self.more)
                    self._send(torchruns if self.more else [])
            time.sleep(0.05)

    def _send(self, processes: list[psutil.Process]) -> None:
        for one in processes:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(HOW[self.how])

    def _look(self) -> tuple[int, str]:
        words = self.folder.with_suffix(".doing").read_text(errors="replace").strip()
        began = re.match(BEGINS, words)
        kinds = (kind for kind, (regex, _) in KINDS.items() if regex and re.search(regex, words))
        kind = next(kinds, "between" if began else "start-up")
        saves = began and kind != "export" and any((self.folder / "checkpoints").glob("*.partial"))
        return EXPORT if kind == "export" else int(began[1]) if began else -1, "saving" if saves else kind


def saved(folder: Path) -> int:
    return max((int(one.name.partition("-")[2]) for one in checkpoints_in(folder)), default=0)


def samples_of(folder: Path) -> list[dict]:
    """Those of whole lines, without the seconds that tools took."""
    file = folder / "samples.jsonl"
    text = file.read_text() if file.exists() else ""
    samples = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    for turn in (turn for one in samples for turn in one.get("turns", ())):
        turn.pop("seconds")
    return samples


def is_due(where: str, needed: int, repeats: int) -> bool:
    """Whether a number ("iteration 3 actor/loss") is of the first `needed` iterations, but for the evaluations that are
    made again when the run goes on: those after the last `repeats` of them."""
    _, iteration, *name = where.split(maxsplit=2)
    return int(iteration) + repeats * "".join(name).startswith("val/") < needed


def lost(whole: Path, run_dir: Path, needed: int) -> list[str]:
    """What is not as in the `whole` run, or is missing though it is of the first `needed` iterations."""
    repeats = 0 if (run_dir / "finished.json").exists() else 1  # evaluations
    found = [f"iterations {saved(run_dir)} to {needed}"] if saved(run_dir) < needed else []
    if needed or (run_dir / "metrics.jsonl").exists():
        differences = compare_metrics(whole / "metrics.jsonl", run_dir / "metrics.jsonl").differences
        found += [d.where for d in differences if d.b != "missing" or is_due(d.where, needed, repeats)]
    samples, written = (samples_of(folder) for folder in (whole, run_dir))
    must = [one for one in samples if one["iteration"] + repeats * (one.get("split") == "val") < needed]
    if written[: len(must)] != must or samples[: len(written)] != written:
        found.append("samples")
    exports = [name for name in EXPORTS if (run_dir / "export" / name).exists() or (run_dir / "finished.json").exists()]
    pairs = (compare_exports(*(folder / "export" / name for folder in (whole, run_dir))) for name in exports)
    return found + [f"{pair.what} {one.where}" for pair in pairs for one in pair.differences]


def check_ends(start, folder: Path, example: str, hows: tuple[str, ...], count: int, iterations: int) -> None:
    """`start(words, doing)` gives the launchers of a run of two ranks."""
    dice, whole, broken = random.Random(1), folder / "whole", folder / "broken"
    (functions := folder / "functions.py").write_text(FUNCTIONS)
    prompts, *own = OF_EXAMPLE[example].format(functions).split()
    lines = (ROOT / f"examples/prompts/{prompts}.jsonl").read_text().splitlines(keepends=True)
    (held_out := folder / "held_out.jsonl").write_text("".join(lines[:6]))
    settings = [*SETTINGS.split(), *own, f"data.val_files=[{held_out}]", f"trainer.iterations={iterations}"]

    def attempt(run: Path, end: End | None = None) -> None:
        (doing := run.with_suffix(".doing")).write_bytes(b"loading modules".ljust(WIDTH))
        words = ("--config", ROOT / f"examples/{example}.yaml", f"trainer.output_dir={run}", *settings)
        launchers = start(words, doing)
        if end:
            end.wait(launchers)
        said = [ended(one, MOST_SECONDS) for one in launchers]
        assert (end and end.found[1]) or not any(one.returncode for one in launchers), said
        eventually(lambda: not left_of(run), lambda: left_of(run))

    attempt(whole)
    kinds = [kind for kind in KINDS if kind != "tool" or example == "calculator_grpo"]
    dice.shuffle(kinds)
    ends = []
    for number in range(count):
        kind, twice = kinds[number % len(kinds)], number // len(kinds) % 2 == 0
        iteration = EXPORT if kind == "export" else dice.randrange(iterations) | (kind == "evaluation")  # every second
        later = dice.uniform(0, KINDS[kind][1]), hows[number % len(hows)], twice * dice.uniform(0.1, 1)
        ends.append(End(broken, kind, iteration, *later))
    for end in sorted(ends, key=lambda end: end.iteration):
        before = saved(broken)
        (broken / "finished.json").unlink(missing_ok=True)  # its export is made again
        attempt(broken, end)
        print(end, flush=True)
        assert not lost(whole, broken, max(before, saved(broken), end.completes)), end
        assert end.is_noted in (None, (broken / "preempted").exists()), end
    attempt(broken)
    assert not lost(whole, broken, iterations) and not (broken / "preempted").exists()


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("example", OF_EXAMPLE)
@pytest.mark.parametrize("hows", [("kill",), ("stop", "preempt", "kill")], ids="-".join)
def test_a_run_that_is_ended_in_any_work_loses_nothing(programs, tmp_path, example, hows):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *LAUNCHER)

    def start(words, doing):
        return [programs.start(*torchrun, TOLD, *words, RLHFUSE_DOING=str(doing))]

    check_ends(start, tmp_path, example, hows, ENDS, ITERATIONS)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_run_on_two_machines_loses_nothing(programs, tmp_path):
    with machines(programs, tmp_path) as two:

        def start(words, doing):
            return two.launch(1, *words, program=TOLD, launcher=LAUNCHER, RLHFUSE_DOING=str(doing))

        check_ends(start, tmp_path, "quickstart", ("preempt", "kill"), 2, 2)
        assert not two.pids(0) and not two.pids(1)


def test_what_a_killed_run_has_lost(tmp_path):
    """Iterations above the newest checkpoint may be missing or half there; nothing may be other than it was."""

    def write(name, metrics, samples="", saved=2):
        folder = tmp_path / name
        (folder / "checkpoints" / f"iteration-{saved}").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(f'{{"iteration": {i}, "a": {a}}}\n' for i, a in metrics))
        (folder / "samples.jsonl").write_text("".join(f'{{"iteration": {i}, "text": "é"}}\n' for i in samples))
        return folder

    whole = write("whole", [(0, 0.5), (1, 0.25), (2, 0.125)], (0, 1, 1, 2), saved=3)
    fine = write("fine", [(0, 0.5), (1, 0.25)], (0, 1, 1, 2))
    with (fine / "samples.jsonl").open("ab") as file:
        file.write(b'{"itera')
    assert not lost(whole, fine, 2) and lost(whole, fine, 3) == ["iterations 2 to 3", "iteration 2"]
    assert lost(whole, write("other", [(0, 0.5), (1, 0.5)], (0, 1, 1)), 2) == ["iteration 1 a"]
    assert lost(whole, write("few", [(0, 0.5), (1, 0.25)], (0, 1)), 2) == ["samples"]
    assert lost(whole, write("twice", [(0, 0.5), (1, 0.25)], (0, 0, 1, 1)), 2) == ["samples"]
