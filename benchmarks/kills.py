"""Ends at random moments of a run that saves and evaluates: what is lost, beside the run that was left alone.

    python benchmarks/kills.py [--kills 20] [--how kill,stop,preempt] [--tools] [--machine WORDS]... [key=value ...]

Trains examples/quickstart.yaml, or with --tools examples/calculator_grpo.yaml, whose tool takes 0 to 0.6 s at random.
Each end waits for a kind of work, in turn, in an iteration drawn from all, and a moment longer. A kill is SIGKILL for
all ranks with what they started, in half of them for torchrun too; a stop is SIGINT and a preemption SIGUSR1 for
torchrun, in half of them twice. What has to be repeated is counted; metrics, samples and weights that are not those of
the run left alone, bit for bit, are lost, and so is an iteration that a single signal did not let end. With
`--machine "ADDRESS COMMAND..."` for each of two machines, COMMAND starts one rank there, by a torchrun of its own.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

DOING = "RLHFUSE_KILLS_DOING"  # in the environment of all processes of a run: the file that holds what rank 0 does
if DOING in os.environ:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGUSR1])  # as tools/train_ppo.py

import psutil
from harness import Figure, Measurement, counting, options
from processes import END_SECONDS, ROOT, run, torchrun
from run_comparison import EXPORTS, compare_exports, compare_metrics

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.config.load import load_config
from rlhfuse.monitor.metrics import read_metrics
from rlhfuse.run.checkpoint.checkpoint import checkpoints_in

WIDTH, ITERATIONS, EXPORT = 200, 10, 1 << 30  # bytes of it; of the run; the iteration that exporting counts as
BEGINS = r"(?:evaluation after )?iteration (-?\d+): "  # of what rank 0 tells its watchdog
KINDS = {  # of work, by the words of it, and the seconds that a kill may come later
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
REWARD = """import time
def slow(completion_ids):
    time.sleep(0.05)
    return [float(len(set(ids))) for ids in completion_ids]
"""
TOOL = """import random, time
def calc(a: int, sign: str, b: int) -> str:
    \"\"\"Add or subtract.

    Args:
        a: The first number.
        sign: + or -.
        b: The second number.
    \"\"\"
    time.sleep(random.SystemRandom().random() * 0.6)
    return str(a + b if sign == "+" else a - b)
"""
SETTINGS = (
    *("rollout.prompts_per_iteration=4", "rollout.max_sequences_per_instance=3", "fusion.least_threshold=4"),
    *("fusion.bs_max=4", "reward.signature=trl", "trainer.save_every=1", "trainer.resume=auto"),
    *("trainer.eval_every=2", "trainer.eval_before_train=true", "trainer.keep_best=true"),
)
OF_STORIES = (  # other than examples/quickstart.yaml's
    *("rollout.max_response_tokens=48", "algorithm.minibatches=2", "fusion.actor_microbatches=2"),
    *("fusion.search_seconds=0.3", "parallel.actor_train=d1t1p2", "parallel.critic_train=d2t1p1"),
    *("parallel.generation=d2t1p1", "parallel.inference=d2t1p1"),
)
OF_CALCULATOR = ("rollout.samples_per_prompt=4", "eval.samples_per_prompt=1")  # than examples/calculator_grpo.yaml's


HOW = {"kill": signal.SIGKILL, "stop": signal.SIGINT, "preempt": signal.SIGUSR1}
LAUNCHER = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout", "630"]


@dataclass
class End:
    """Waits for a kind of work in an iteration, or for a later one, and `seconds` more; then it ends the run."""

    folder: Path
    kind: str
    iteration: int
    seconds: float
    how: str
    more: float  # 0, or the seconds to a second signal; of a kill, that torchrun dies too
    found: tuple[int, str, str] = (-1, "", "")  # iteration and kind of work that was ended, what rank 0 said of it
    began: float = 0.0
    took: float = 0.0  # seconds until torchrun had ended

    @property
    def completes(self) -> int:
        """Iterations that are done and saved afterwards, because they were under way."""
        number, kind, _ = self.found
        return number + 1 if self.how != "kill" and not self.more and kind not in ("export", "start-up") else 0

    @property
    def is_noted(self) -> bool | None:
        """Whether the run's folder is to say that the run goes on; None where both may be."""
        finished = (self.folder / "finished.json").exists()
        return None if self.found[1] in ("", "start-up") else self.how == "preempt" and not finished

    def __call__(self, launcher: Popen) -> None:
        iteration, kind, _ = self._look()
        here = kind == self.kind and (iteration == self.iteration or kind == "start-up")
        if not self.found[1] and (here or iteration > self.iteration):
            time.sleep(self.seconds)
            if launcher.poll() is None:
                self.found, self.began = self._look(), time.monotonic()
                parent = psutil.Process(launcher.pid)
                torchruns = [parent] if "torch.distributed.run" in parent.cmdline() else parent.children()
                below = [one for torchrun in torchruns for one in torchrun.children(recursive=True)]
                if self.how == "kill":
                    self._send([*torchruns, *below][0 if self.more else len(torchruns) :])
                else:
                    self._send(torchruns)
                    time.sleep(self.more)
                    self._send(torchruns if self.more else [])

    def _send(self, processes: list[psutil.Process]) -> None:
        for one in processes:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(HOW[self.how])

    def _look(self) -> tuple[int, str, str]:
        words = self.folder.with_suffix(".doing").read_text(errors="replace").strip()
        began = re.match(BEGINS, words)
        kinds = (kind for kind, (regex, _) in KINDS.items() if regex and re.search(regex, words))
        kind = next(kinds, "between" if began else "start-up")
        saves = began and kind != "export" and any((self.folder / "checkpoints").glob("*.partial"))
        number = EXPORT if kind == "export" else int(began[1]) if began else -1
        return number, "saving" if saves else kind, words


@dataclass(frozen=True)
class Runs:
    """How the runs of an example are started: on this machine, or a rank on each of two."""

    example: str
    changes: list[str]
    machines: list[list[str]]  # address and command of each

    def command(self, folder: Path) -> list[str]:
        settings = [f"trainer.output_dir={folder}", *self.changes]
        program = [__file__, str(ROOT / "examples" / f"{self.example}.yaml"), *settings]
        if not self.machines:
            return [*torchrun(2), *LAUNCHER, *program]
        port = 29500 + random.SystemRandom().randrange(1000)
        job = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", str(port)]
        job += ["--rdzv-endpoint", f"{self.machines[0][0]}:{port}", *LAUNCHER]
        one, other = (
            shlex.join([*words, sys.executable, "-m", "torch.distributed.run", *job, "--local-addr", address, *program])
            for address, *words in self.machines
        )
        return ["sh", "-c", f"{one} & one=$!; {other} & other=$!; wait $one && wait $other"]


def attempt(folder: Path, runs: Runs, end: End | None = None) -> int:
    """Start a run, which ends by itself or by `end`; how many of its processes are left later."""
    doing = folder.with_suffix(".doing")
    doing.write_bytes(b"loading modules".ljust(WIDTH))
    try:
        run(runs.command(folder), timeout=900, watch=end or (lambda _: None), more={DOING: str(doing)})
    except RuntimeError:
        if not (end and end.found[1]):
            raise
    if end and end.found[1]:
        end.took = time.monotonic() - end.began

    def lives(one: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            return one.status() != psutil.STATUS_ZOMBIE and one.environ().get(DOING) == str(doing)
        return False

    until = time.monotonic() + END_SECONDS
    while (left := sum(map(lives, psutil.process_iter()))) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def saved(folder: Path) -> int:
    return max((int(one.name.partition("-")[2]) for one in checkpoints_in(folder)), default=0)


def samples_of(folder: Path) -> list[dict[str, Any]]:
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


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--kills", type=counting, default=20)
    parser.add_argument("--how", default="kill", help="kinds of ends, in turn: of kill, stop and preempt")
    parser.add_argument("--machine", action="append", default=[], help="address, and the words before a command")
    parser.add_argument("--tools", action="store_true", help="train the example that calls a tool")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the program's")
    arguments = parser.parse_intermixed_args()
    count, iterations = (2, 2) if arguments.quick else (arguments.kills, ITERATIONS)
    measurement, dice = Measurement("kills", arguments, timed=False), random.Random(arguments.seed)
    rows, gone, left, repeated, ends, untold = [], [], 0, 0, [], 0
    hows = arguments.how.split(",")
    if odd := set(hows) - set(HOW):
        raise InputError(f"--how {odd.pop()} is none of {', '.join(HOW)}")
    with tempfile.TemporaryDirectory() as folder:
        names = "whole", "killed", "functions.py", "held_out.jsonl"
        whole, broken, functions, held_out = (Path(folder) / name for name in names)
        functions.write_text(TOOL if arguments.tools else REWARD)
        example, prompts = ("calculator_grpo", "calculator_train") if arguments.tools else ("quickstart", "quickstart")
        held_out.write_text("".join((ROOT / f"examples/prompts/{prompts}.jsonl").open().readlines()[:6]))
        named = "rollout.multi_turn.function_tool_path={}" if arguments.tools else "reward.function={}:slow"
        own = [named.format(functions), f"data.val_files=[{held_out}]", f"trainer.iterations={iterations}"]
        more = OF_CALCULATOR if arguments.tools else OF_STORIES
        changes = [*SETTINGS, *more, *own, *arguments.overrides]
        runs = Runs(example, changes, [shlex.split(words) for words in arguments.machine])
        attempt(whole, runs)
        kinds = [kind for kind in KINDS if kind != "tool" or arguments.tools]
        dice.shuffle(kinds)
        for number in range(count):
            kind, twice = kinds[number % len(kinds)], number // len(kinds) % 2 == 0
            iteration = (
                EXPORT if kind == "export" else dice.randrange(iterations) | (kind == "evaluation")
            )  # every second
            later = dice.uniform(0, KINDS[kind][1]), hows[number % len(hows)], twice * dice.uniform(0.1, 1)
            ends.append(End(broken, kind, iteration, *later))
        for end in sorted(ends, key=lambda end: end.iteration):
            before = saved(broken)
            (broken / "finished.json").unlink(missing_ok=True)  # its export is made again
            left += attempt(broken, runs, end)
            gone += (now := lost(whole, broken, max(before, saved(broken), end.completes)))
            noted = (broken / "preempted").exists()
            wrongly = end.is_noted is not None and noted != end.is_noted
            untold += wrongly
            metrics = read_metrics(broken / "metrics.jsonl") if (broken / "metrics.jsonl").exists() else []
            repeated += (done := metrics[-1]["iteration"] + 1 if metrics else 0) - saved(broken)
            by = f"{end.how}{', torchrun too' * (end.how == 'kill') or ', twice' if end.more else ''}"
            told = ("no", "yes")[noted] + ", wrongly" * wrongly
            counts = f"{end.took:.1f}", str(done), str(saved(broken)), told
            rows.append([*end.found[1:], by, *counts, "; ".join(now) or "nothing"])
            measurement.say(" | ".join(rows[-1]))
        attempt(broken, runs)
        gone += lost(whole, broken, iterations)
        untold += (broken / "preempted").exists()
    head = ("in", "rank 0 was in", "by", "seconds", "iterations done", "saved", "preempted", "lost")
    measurement.table("kills", f"Runs ended by {', '.join(HOW[how].name for how in hows)}", head, rows)
    measurement.figure("lost", Figure(len(gone)).at_most(0))
    measurement.figure("processes_left", Figure(left).at_most(0))
    measurement.figure("untold", Figure(untold).at_most(0))
    measurement.figure("kills", sum(row[0] != "" for row in rows))
    measurement.figure("repeated", repeated, "iterations")
    measurement.finish()


def rank() -> None:
    """One rank of the run, as the training program is one, where rank 0 writes what it does into a file."""
    from rlhfuse.monitor.watchdog import Watchdog
    from rlhfuse.parallel.first_error import prints_error
    from rlhfuse.run.launch import train

    progress, file, began = Watchdog.progress, os.open(os.environ[DOING], os.O_WRONLY), ""

    def told(self: Watchdog, doing: str) -> None:
        nonlocal began
        found = re.match(BEGINS, doing)
        began = found[0] if found else began
        os.pwrite(file, (began + doing.removeprefix(began)).encode()[:WIDTH].ljust(WIDTH), 0)
        progress(self, doing)

    if os.environ["RANK"] == "0":
        Watchdog.progress = told
    config, *changes = sys.argv[1:]
    run_program(lambda: train(load_config(config, changes), Path(config).stem), tear_down=False, prints=prints_error)


if __name__ == "__main__":
    rank() if DOING in os.environ else run_program(main)
