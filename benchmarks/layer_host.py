"""Host cost of a decoder layer of an 8B model: CPU microseconds on a null CUDA device, for this checkout and another.

    git worktree add ../before HEAD^; python benchmarks/layer_host.py --beside ../before

Two processes hold a middle stage of some layers each and take turns. Python, torch's dispatcher, autograd and
Triton's launcher are real; what CUDA's libraries take for a launch is not in it (benchmarks/null_device).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import ROOT, Figure, Measurement, options, take_turns
from processes import environment

from rlhfuse.base.errors import InputError
from rlhfuse.tools.program import run_program

SIDE = ROOT / "benchmarks" / "layer_host_side.py"
LAYERS = 8  # of the stage
GOALS = {"forward": 8.0, "backward": 5.0, "scoring": 8.0}  # times less


class Side:
    """The process of a checkout."""

    def __init__(self, checkout: Path) -> None:
        if not (checkout / "rlhfuse").is_dir():
            raise InputError(f"--beside {checkout}: there is no rlhfuse in it; name a checkout")
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(1))
        self._process: Any = subprocess.Popen([sys.executable, SIDE, checkout, str(LAYERS)], **pipes)

    def times(self, round: int) -> dict[str, float]:
        """Microseconds a layer."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"a side ended with exit code {self._process.wait()}")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = options(__doc__, rounds=7, seed=False)
    parser.add_argument("--beside", metavar="CHECKOUT", type=Path, help="another checkout, to compare with")
    arguments = parser.parse_args()
    measurement = Measurement("layer_host", arguments)
    checkouts = {"here": ROOT} | ({"before": arguments.beside.resolve()} if arguments.beside else {})
    sides = {name: Side(checkout) for name, checkout in checkouts.items()}
    found = take_turns({name: side.times for name, side in sides.items()}, arguments.rounds, warm_up=True)
    for side in sides.values():
        side.close()
    rows = []
    for phase, goal in GOALS.items():
        taken = {name: [answer[phase] for answer in answers] for name, answers in found.items()}
        figures = measurement.part(phase)
        cells = [figures.figure(name, Figure.of(values, "us")).text(".1f") for name, values in taken.items()]
        if "before" in taken:
            cells.append(
                figures.figure("ratio", Figure.ratio(taken["before"], taken["here"]).at_least(goal)).text(".2f")
            )
        rows.append([phase, *cells])
    head = ["CPU us a layer", *sides, *(["times less"] if "before" in sides else [])]
    measurement.table("host", f"A layer of 8B on the host, 2,048 tokens, a stage of {LAYERS}", head, rows)
    measurement.finish()


if __name__ == "__main__":
    run_program(main)
