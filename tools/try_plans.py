"""Launch the best tables of a search for a few iterations each, and print measured beside predicted seconds.

    python tools/plan.py --config run.yaml --world-size 4 --search --json > search.json
    python tools/try_plans.py --config run.yaml --search search.json --top 3 --out tried [key=value ...]

A few minutes of the ranks settle what a model cannot. Each table trains from the beginning in a folder of its own,
OUT/1, OUT/2, ..., whose costs.json prices later plans (fusion.profile); no checkpoint is written. --launcher replaces
`torchrun --standalone --nproc-per-node RANKS` where ranks are on several nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text_table import aligned

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.base.files import write_json
from rlhfuse.base.json_values import read_json
from rlhfuse.base.launcher import module_command
from rlhfuse.config.load import load_config
from rlhfuse.planning.price import GENERATION, MOVES, SCHEDULES, STEPS

ROOT = Path(__file__).resolve().parents[1]
END_SECONDS = 20.0  # that a launcher gets to end its ranks
PHASES = {  # of metrics.jsonl, and the parts of a table's price
    "gen+infer": (("timing_s/gen", "timing_s/infer"), (GENERATION,)),
    "train": (("timing_s/train",), (SCHEDULES, STEPS)),
    "moves": (("timing_s/reshard",), (MOVES,)),
}
QUIET = ("trainer.export=false", "trainer.save_every=0", "trainer.tensorboard=false", "trainer.resume=never")


@dataclass(frozen=True)
class Tried:
    """A table that ran: seconds by phase, predicted and measured."""

    overrides: tuple[str, ...]
    predicted: Mapping[str, float]
    measured: Mapping[str, float]

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of an iteration, predicted and measured."""
        return sum(self.predicted.values()), sum(self.measured.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the best tables of a search for a few iterations each.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--search", required=True, metavar="FILE", help="what tools/plan.py --search --json printed")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="new folder for the runs and tried.json")
    parser.add_argument("--top", type=int, default=3, help="so many tables, the best first [%(default)s]")
    parser.add_argument("--iterations", type=int, default=4, help="of each [%(default)s]")
    parser.add_argument("--skip", type=int, default=1, help="iterations that only warm up [%(default)s]")
    parser.add_argument("--launcher", help="words before tools/train_ppo.py")
    args = parser.parse_intermixed_args()
    if args.top < 1 or args.skip < 0 or args.iterations <= args.skip:
        raise InputError(f"--top {args.top} --iterations {args.iterations} --skip {args.skip} leave nothing to measure")
    world, tables = read_search(args.search)
    load_config(args.config, [*args.overrides, *tables[0]["overrides"]])  # refuses bad settings before anything runs
    out = Path(args.out)
    if out.exists():
        raise InputError(f"--out {out} exists; give another name")
    out.mkdir(parents=True)
    launcher = shlex.split(args.launcher) if args.launcher else torchrun(world)
    tried = []
    for number, table in enumerate(tables[: args.top], start=1):
        print(f"table {number}: {' '.join(table['overrides'])}", flush=True)
        words = ["--config", args.config, *args.overrides, *table["overrides"], *QUIET]
        words += [f"trainer.iterations={args.iterations}", f"trainer.output_dir={out / str(number)}"]
        launch([*launcher, str(ROOT / "tools" / "train_ppo.py"), *words], out / f"{number}.log")
        metrics = (out / str(number) / "metrics.jsonl").read_text().splitlines()
        tried.append(Tried(tuple(table["overrides"]), *by_phase(table["parts"], metrics[args.skip :])))
    show(tried)
    write_json(out / "tried.json", {"tables": [{**vars(table), "seconds": table.seconds} for table in tried]})
    print(f"written: {out / 'tried.json'}")
    return 0


def read_search(path: str) -> tuple[int, list[dict[str, Any]]]:
    """World size and tables, the best first. Raises InputError for another file."""
    raw = read_json(path)
    if not isinstance(raw, dict) or "world_size" not in raw or not raw.get("tables"):
        raise InputError(f"{path} holds no tables; write it with tools/plan.py --search --json")
    return raw["world_size"], raw["tables"]


def torchrun(world: int) -> list[str]:
    return module_command("torch.distributed.run", "--standalone", "--nproc-per-node", str(world))


def launch(command: Sequence[str], log: Path) -> None:
    """Run to the end; whatever happens here, no rank is left. Raises RuntimeError with the end of the log."""
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{shlex.join(command)} ended with {code}; {log} ends with\n{tail}")


def by_phase(parts: Mapping[str, float], lines: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each phase: predicted by the table's parts, and the median over the iterations of metrics.jsonl."""
    rows = [json.loads(line) for line in lines]
    predicted = {phase: sum(parts[name] for name in names) for phase, (_, names) in PHASES.items()}
    measured = {
        phase: statistics.median(sum(row.get(key, 0.0) for key in keys) for row in rows)
        for phase, (keys, _) in PHASES.items()
    }
    return predicted, measured


def show(tried: Sequence[Tried]) -> None:
    """The tables in the order of the search; the fastest measured is marked."""
    best = min(tried, key=lambda table: table.seconds[1])
    lines = [("table", *PHASES, "iteration", "off by", "layouts")]
    for number, table in enumerate(tried, start=1):
        predicted, measured = table.seconds
        phases = [f"{table.measured[phase]:.3g} ({table.predicted[phase]:.3g})" for phase in PHASES]
        ends = f"{measured:.3g} ({predicted:.3g})", f"{predicted / measured - 1:+.0%}"
        lines.append((f"{number}{' fastest' if table is best else ''}", *phases, *ends, " ".join(table.overrides)))
    print("\n".join(["seconds of an iteration, measured (predicted)", *aligned(lines, left=(len(lines[0]) - 1,))]))


if __name__ == "__main__":
    run_program(main)
