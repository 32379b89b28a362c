"""Everything that only a GPU can show, in one call: each check compares CUDA with the CPU or with plain formulas.

    bash scripts/gpu_check.sh                    all checks; the last line printed is one JSON object
    bash scripts/gpu_check.sh --prepare whl      where there is a network: wheels and the CPU's references, to carry
    bash scripts/gpu_check.sh --wheels whl --budget 540 --out check.json     on a GPU machine without one
    python tools/gpu_check.py --device cpu       a rehearsal: the same checks with the CPU in the GPU's place

Each check has a process and a time limit of its own; one that fails, crashes or hangs is recorded and stops no other.
Models are random and made here. Exit code 0: all checks that ran are good; 1: one failed; 2: bad input. Without CUDA
nothing is checked, which the object says, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__:  # installed: rlhfuse is found without help, and gpu_checks lies beside this file
    sys.path.insert(0, os.path.dirname(__file__))

from gpu_checks import kit

from rlhfuse.base.errors import InputError, run_program

if TYPE_CHECKING:
    from gpu_checks.isolation import Check, Result

TOOLS = Path(__file__).resolve().parent
REHEARSAL = 8  # a CPU in the GPU's place is given so many times its seconds: the engine's kernels may be compiled


def main() -> int:
    parser = argparse.ArgumentParser(description="Check every CUDA path of rlhfuse on this machine.")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: rehearse the checks on the CPU")
    parser.add_argument("--only", metavar="TEXT", default="", help="run only the checks whose name holds this text")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop in time; the most telling checks first")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the object, complete after each check")
    parser.add_argument(
        "--prepare", type=Path, metavar="FOLDER", help="fetch wheels, compute references, check nothing"
    )
    parser.add_argument("--python", metavar="X.Y", default="3.12", help="of the machine without network (%(default)s)")
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="what --prepare filled: installed beside it, used"
    )
    args = parser.parse_args()
    began = time.monotonic()
    own = [TOOLS] if __package__ else [TOOLS.parent, TOOLS]
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, own), os.environ.get("PYTHONPATH", "")])
    if args.prepare:
        return prepare(args.prepare, args.python)
    references = None
    if args.wheels:
        kit.put_first(kit.install(args.wheels))
        references = args.wheels / kit.REFERENCES
    until = began + (args.budget or math.inf)
    return run_checks(args.device, args.only, until, args.out, references)


def prepare(folder: Path, python: str) -> int:
    """Fill `folder`. Raises InputError where it grew too large to carry."""
    import gpu_checks.imports  # noqa: F401  # first: it silences what Megatron warns of
    from gpu_checks.luggage import write_references

    kit.download(folder, python)
    write_references(folder / kit.REFERENCES)
    size = kit.size_of(folder)
    wheels = sorted(file.name for file in folder.glob("*.whl"))
    print("\n".join([*wheels, f"{len(wheels)} wheels and the CPU's references in {folder}: {size / 2**20:.1f} MiB"]))
    if size > kit.LARGEST_BYTES:
        raise InputError(f"{folder} holds {size / 2**20:.1f} MiB, more than {kit.LARGEST_BYTES >> 20} MiB")
    return 0


class Session:
    """The checks of one call and what has come of them; `out` holds it after each."""

    def __init__(self, kind: str, folder: Path, references: Path | None, out: Path | None) -> None:
        from gpu_checks import isolation

        self._run, self._context = isolation.run_isolated, isolation.starts_with()
        self._kind, self._folder, self._references, self._out = kind, folder, references, out
        self.facts: dict[str, Any] = {}
        self.results: list[Result] = []
        self.left_out: list[str] = []

    def run(self, check: Check, seconds_left: float = math.inf) -> None:
        limit = min(check.limit * (1 if self._kind == "cuda" else REHEARSAL), seconds_left)
        result = self._run(check, self._kind, self._folder, self._references, self._context, limit)
        self.results.append(result)
        word = "ok  " if result.ok else "FAIL"
        print(f"{word} {result.name} ({result.seconds} s): {json.dumps(result.detail)}", file=sys.stderr, flush=True)
        self.save()

    def report(self) -> dict[str, Any]:
        from gpu_checks.catalog import NOT_SHOWN

        ok = all(result.ok for result in self.results)
        told = {"ok": ok, **self.facts, "one_gpu_cannot_show": NOT_SHOWN, "left_out": self.left_out}
        return told | {"checks": [asdict(result) for result in self.results]}

    def save(self) -> None:
        from rlhfuse.base.files import write_json

        if self._out:
            write_json(self._out, self.report())


def run_checks(wanted: str, only: str, until: float, out: Path | None, references: Path | None) -> int:
    """Run the chosen checks and print the object."""
    from gpu_checks.catalog import PROBE, all_checks

    with tempfile.TemporaryDirectory() as folder:
        session = Session("cpu" if wanted == "cpu" else "cuda", Path(folder), references, out)
        session.run(PROBE)
        probe = session.results[0]
        found: dict[str, Any] = probe.detail if isinstance(probe.detail, dict) else {}
        on_gpu = bool(found.get("cuda")) and wanted == "auto"
        session.facts = {"cuda": on_gpu, "environment": found.get("environment", {})}
        if wanted == "auto" and probe.ok and not on_gpu:
            session.results.clear()
            session.facts["said"] = "no CUDA device here: nothing was checked"
        else:
            for check in all_checks():
                if only in check.name and check.name != PROBE.name:
                    left = until - time.monotonic()
                    if left < (check.seconds if on_gpu else 1) or not (on_gpu or check.rehearsed):
                        session.left_out.append(check.name)
                    else:
                        session.run(check, left)
        session.save()
        report = session.report()
    print(json.dumps(report))
    return 0 if report["ok"] else 1


def run() -> None:
    """The installed program."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_program(main, tear_down=False)


if __name__ == "__main__":
    run()
