"""kill -9 at random moments of a run that saves and evaluates: what is lost, beside the run that was left alone.

    python benchmarks/kills.py [--kills 20] [--tools] [key=value ...]

Trains examples/quickstart.yaml, or with --tools examples/calculator_grpo.yaml, whose tool takes 0 to 0.6 s at random.
Each kill waits for a kind of work, in turn, in an iteration drawn from all, and a moment longer. All ranks die with
what they started, in half of the kills torchrun too. Iterations may be repeated; metrics, samples and weights that are
not those of the run left alone, bit for bit, are lost.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
from harness import Figure, Measurement, counting, options
from processes import END_SECONDS, ROOT, run, torchrun
from run_comparison import EXPORTS, compare_exports, compare_metrics

from rlhfuse.base.errors import run_program
from rlhfuse.config.load import load_config
from rlhfuse.monitor.metrics import read_metrics
from rlhfuse.run.checkpoint.checkpoint import checkpoints_in

DOING = "RLHFUSE_KILLS_DOING"  # in the environment of all processes of a run: the file that holds what rank 0 does
WIDTH, ITERATIONS, EXPORT = 200, 10, 1 << 30  # bytes of it; of the run; the iteration that exporting counts as
BEGINS = r"(?:evaluation after )?iteration (-?\d+): "  # of what rank 0 tells its watchdog
KINDS = {  # of work, by the words of it, and the seconds that a kill may come later
    "start-up": ("", 10.0),
    "export": ("exporting", 0.02),
    "evaluation": ("evaluat", 0.5),
    "tool": ("wait for tools|tool .* of sample", 0.3),
    "generation": ("generation|moving weights", 0.2),
    "inference": ("inference: [^w]|inter-stage", 0.1),
    "reward": ("reward function", 0.3),
    "training": ("training|actor:|critic:", 0.3),
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


@dataclass
class Kill:
    """Waits for a kind of work in an iteration, or for a later one, and `seconds` more; then it kills the run."""

    folder: Path
    kind: str
    iteration: int
    seconds: float
    torchrun: bool  # dies too
    found: tuple[str, str] = ("", "")  # the kind of work that was killed, and what rank 0 said of it

    def __call__(self, launcher: Popen) -> None:
        iteration, kind, _ = self._look()
        here = kind == self.kind and (iteration == self.iteration or kind == "start-up")
        if not self.found[0] and (here or iteration > self.iteration):
            time.sleep(self.seconds)
            if launcher.poll() is None:
                self.found = self._look()[1:]
                parent = psutil.Process(launcher.pid)
                for one in [parent, *parent.children(recursive=True)][not self.torchrun :]:
                    with suppress(psutil.NoSuchProcess):
                        one.kill()

    def _look(self) -> tuple[int, str, str]:
        words = self.folder.with_suffix(".doing").read_text(errors="replace").strip()
        began = re.match(BEGINS, words)
        kinds = (kind for kind, (regex, _) in KINDS.items() if regex and re.search(regex, words))
        kind = next(kinds, "between" if began else "start-up")
        saves = began and kind != "export" and any((self.folder / "checkpoints").glob("*.partial"))
        number = EXPORT if kind == "export" else int(began[1]) if began else -1
        return number, "saving" if saves else kind, words


def attempt(folder: Path, example: str, changes: list[str], kill: Kill | None = None) -> int:
    """Start the run of an example, which ends by itself or by `kill`; how many of its processes are left later."""
    doing = folder.with_suffix(".doing")
    doing.write_bytes(b"loading modules".ljust(WIDTH))
    words = [*torchrun(2), __file__, ROOT / "examples" / f"{example}.yaml", f"trainer.output_dir={folder}"]
    try:
        run([*words, *changes], timeout=900, watch=kill or (lambda _: None), more={DOING: str(doing)})
    except RuntimeError:
        if not (kill and kill.found[0]):
            raise

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
    parser.add_argument("--tools", action="store_true", help="train the example that calls a tool")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the program's")
    arguments = parser.parse_intermixed_args()
    count, iterations = (2, 2) if arguments.quick else (arguments.kills, ITERATIONS)
    measurement, dice = Measurement("kills", arguments, timed=False), random.Random(arguments.seed)
    rows, gone, left, repeated, kills = [], [], 0, 0, []
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
        attempt(whole, example, changes)
        kinds = [kind for kind in KINDS if kind != "tool" or arguments.tools]
        dice.shuffle(kinds)
        for number in range(count):
            kind, both = kinds[number % len(kinds)], number // len(kinds) % 2 == 0
            iteration = (
                EXPORT if kind == "export" else dice.randrange(iterations) | (kind == "evaluation")
            )  # every second
            kills.append(Kill(broken, kind, iteration, dice.uniform(0, KINDS[kind][1]), both))
        for kill in sorted(kills, key=lambda kill: kill.iteration):
            before = saved(broken)
            left += attempt(broken, example, changes, kill)
            gone += (now := lost(whole, broken, max(before, saved(broken))))
            metrics = read_metrics(broken / "metrics.jsonl") if (broken / "metrics.jsonl").exists() else []
            repeated += (done := metrics[-1]["iteration"] + 1 if metrics else 0) - saved(broken)
            who, told = "ranks, torchrun" if kill.torchrun else "ranks", "; ".join(now) or "nothing"
            rows.append([*kill.found, who, str(done), str(saved(broken)), told])
            measurement.say(" | ".join(rows[-1]))
        attempt(broken, example, changes)
        gone += lost(whole, broken, iterations)
    head = ("in", "rank 0 was in", "killed", "iterations done", "saved", "lost")
    measurement.table("kills", "Runs killed by SIGKILL", head, rows)
    measurement.figure("lost", Figure(len(gone)).at_most(0))
    measurement.figure("processes_left", Figure(left).at_most(0))
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
