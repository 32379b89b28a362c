"""Everything that only a GPU can show: each check compares CUDA with the CPU or with formulas, or times it.

    bash scripts/gpu_check.sh --budget 540 --out check.json --hardware gpu.json    does it work, and how fast
    bash scripts/gpu_check.sh --done check.json --out check.json --hardware gpu.json         goes on where that stopped
    bash scripts/gpu_check.sh --names 'stage_*,decode_8b'                           these alone
    bash scripts/gpu_check.sh --prepare whl      where there is a network: wheels and the CPU's references, to carry
    bash scripts/gpu_check.sh --wheels whl ...   on a GPU machine without one
    python tools/gpu_check.py --device cpu       a rehearsal: the same checks with the CPU in the GPU's place

Checks of several GPUs run where there are two or more. One that fails, crashes or hangs is recorded and stops no other.
Models are random and made here. A table of what was measured, beside the limit and the planner's price, goes before
the last line, which is one JSON object. Exit code 0: all checks that ran are good; 1: one failed; 2: bad input. Without
CUDA nothing is checked, which the object says, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import fnmatch
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_checks import kit
from program import run_program

from rlhfuse.base.errors import InputError

if TYPE_CHECKING:
    from gpu_checks.isolation import Check, Result, Surroundings, Worker

TOOLS = Path(__file__).resolve().parent
REHEARSAL = 8  # a CPU in the GPU's place is given so many times its seconds: the engine's kernels may be compiled
REHEARSED_RANKS = 2  # that stand for GPUs
SAME = ("name", "devices", "driver", "torch", "triton", "python")  # of the environment, where results are taken over


@dataclass(frozen=True)
class Request:
    """What a call asks for. `until`: of time.monotonic."""

    device: str = "auto"
    names: str = ""
    until: float = math.inf
    out: Path | None = None
    hardware: Path | None = None
    done: Path | None = None
    references: Path | None = None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: rehearse the checks on the CPU")
    parser.add_argument("--names", metavar="A,B", default="", help="these checks alone; * stands for any text")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop in time; the most telling checks first")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the object, complete after each check")
    parser.add_argument("--done", type=Path, metavar="FILE", help="an earlier object: what is good there is taken over")
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", help="what was measured, for trainer.hardware=measured:FILE"
    )
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
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"  # of processes that are ended, not left
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), quiet)))
    if args.prepare:
        return prepare(args.prepare, args.python)
    references = None
    if args.wheels:
        kit.put_first(kit.install(args.wheels))
        references = args.wheels / kit.REFERENCES
    until = began + (args.budget or math.inf)
    request = Request(args.device, args.names, until, args.out, args.hardware, args.done, references)
    return run_checks(request)


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


def chosen(checks: Sequence[Check], names: str) -> list[Check]:
    """Those that `names` lists. Raises InputError for one that is none, with the nearest."""
    patterns, known = [name.strip() for name in names.split(",") if name.strip()], [check.name for check in checks]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            near = difflib.get_close_matches(pattern, known, 1, 0.0)[0]
            raise InputError(f"--names {pattern}: no check is called so; the nearest is {near}")
    return [one for one in checks if not patterns or any(fnmatch.fnmatchcase(one.name, p) for p in patterns)]


class Session:
    """The checks of one call and what has come of them; `out` holds it after each."""

    def __init__(self, request: Request, place: Surroundings, done: Mapping[str, Result]) -> None:
        self._request, self._place, self._done = request, place, done
        self._background: dict[str, Worker] = {}
        self._together: Worker | None = None  # the process of the small checks
        self._next: Worker | None = None  # imports while the check before it runs
        self.facts: dict[str, Any] = {}
        self.results: list[Result] = []
        self.left_out: list[str] = []
        self.gpus = 0

    @property
    def _on_gpu(self) -> bool:
        return self._place.kind == "cuda"

    def run_all(self, checks: Sequence[Check]) -> None:
        """In order, as far as the time goes; what compiles begins at once, beside the others."""
        from gpu_checks.isolation import Worker

        for check in checks:
            if check.background and self._runs(check) and check.name not in self._done:
                self._background[check.name] = Worker(self._place)
                self._background[check.name].begin(check, self._limit(check))
        for check in checks:
            if check.name in self._done:
                self.results.append(self._done[check.name])
            elif self._runs(check):
                self._record(self._run(check))
            else:
                self.left_out.append(check.name)
        self.save()

    def _runs(self, check: Check) -> bool:
        left = self._request.until - time.monotonic()
        return left >= (check.seconds if self._on_gpu else 1) and (self._on_gpu or check.rehearsed)

    def _limit(self, check: Check) -> float:
        return min(check.limit * (1 if self._on_gpu else REHEARSAL), self._request.until - time.monotonic())

    def _run(self, check: Check) -> Result:
        from gpu_checks.isolation import Worker

        if check.name in self._background:
            worker = self._background.pop(check.name)
            try:
                return worker.result()
            finally:
                worker.close()
        if check.small:
            self._together = self._together or Worker(self._place)
            self._together.begin(check, self._limit(check))
            if (result := self._together.result()).ok:
                return result
            self._together.close()  # what failed may have left the device behind in any state
            self._together = None
            print(
                f"     {check.name} failed among others, and runs alone: {result.detail}", file=sys.stderr, flush=True
            )
        return self._run_alone(check, self._limit(check))

    def _run_alone(self, check: Check, limit: float) -> Result:
        """The result of a check in a process that has run no other."""
        from gpu_checks.isolation import Worker

        worker, self._next = self._next or Worker(self._place), Worker(self._place)
        try:
            worker.begin(check, limit)
            return worker.result()
        finally:
            worker.close()

    def run_probe(self, check: Check) -> Result:
        """Whatever the budget."""
        self._record(self._run_alone(check, check.limit))
        return self.results[-1]

    def _record(self, result: Result) -> None:
        self.results.append(result)
        why = "" if result.ok else f": {json.dumps(result.detail)}"
        print(f"{'ok  ' if result.ok else 'FAIL'} {result.name} ({result.seconds} s){why}", file=sys.stderr, flush=True)
        self.save()

    def close(self) -> None:
        """End what still runs."""
        for worker in (*self._background.values(), self._together, self._next):
            if worker:
                worker.close()

    def report(self) -> dict[str, Any]:
        from gpu_checks.catalog import not_shown

        ok = all(result.ok for result in self.results)
        told = {"ok": ok, **self.facts, "not_shown": not_shown(self.gpus), "left_out": self.left_out}
        return told | {"checks": [asdict(result) for result in self.results]}

    def save(self) -> None:
        from rlhfuse.base.files import write_json

        if self._request.out:
            write_json(self._request.out, self.report())


def run_checks(request: Request) -> int:
    """Run the chosen checks, print the table and the object, write what was measured."""
    from gpu_checks import catalog, isolation

    wanted = chosen(catalog.all_checks(), request.names)
    earlier = read_report(request.done) if request.done else {}
    with tempfile.TemporaryDirectory() as folder:
        kind = "cpu" if request.device == "cpu" else "cuda"
        place = isolation.Surroundings(kind, Path(folder), request.references, isolation.starts_with())
        session = Session(request, place, good_results(earlier))
        try:
            probe = session.run_probe(catalog.PROBE)
            found: dict[str, Any] = probe.detail if isinstance(probe.detail, dict) else {}
            on_gpu, facts = bool(found.get("cuda")) and kind == "cuda", found.get("environment", {})
            session.gpus = facts.get("devices", 0) if on_gpu else REHEARSED_RANKS * (kind == "cpu")
            session.facts = {"cuda": on_gpu, "environment": facts}
            if kind == "cuda" and probe.ok and not on_gpu:
                session.results.clear()
                session.facts["said"] = "no CUDA device here: nothing was checked"
                session.save()
            else:
                check_same(earlier, facts, request.done)
                if session.gpus and all(check.gpus > session.gpus for check in wanted):
                    needs = f"needs {min(check.gpus for check in wanted)} GPUs, here are {session.gpus}"
                    raise InputError(
                        f"--names {request.names}: {needs}; --device cpu rehearses on {REHEARSED_RANKS} ranks"
                    )
                names = {check.name for check in wanted} - {catalog.PROBE.name}
                session.run_all([check for check in catalog.all_checks(session.gpus) if check.name in names])
        finally:
            session.close()
    report = session.report()
    print("\n".join(lines_of(report, request.hardware)))
    print(json.dumps(report))
    return 0 if report["ok"] else 1


def read_report(path: Path) -> dict[str, Any]:
    """The object of an earlier call. Raises InputError naming the file."""
    from gpu_checks.isolation import Result

    from rlhfuse.base.json_values import from_json, read_json

    raw = read_json(path)
    if not isinstance(raw, dict) or not isinstance(raw.get("environment"), dict) or "checks" not in raw:
        raise InputError(f"{path} is not what scripts/gpu_check.sh --out wrote")
    return raw | {"checks": from_json(list[Result], raw["checks"], f"{path}: checks")}


def good_results(report: Mapping[str, Any]) -> dict[str, Result]:
    """By name; the probe runs again."""
    return {result.name: result for result in report.get("checks", ()) if result.ok and result.name != "probe"}


def check_same(earlier: Mapping[str, Any], facts: Mapping[str, Any], path: Path | None) -> None:
    """Raises InputError where results would be taken over from another machine, or from other libraries."""
    for name in SAME if earlier else ():
        then, now = earlier["environment"].get(name), facts.get(name)
        if then != now:
            raise InputError(
                f"--done {path}: its {name} is {then}, here it is {now}; run all checks here, without --done"
            )


def lines_of(report: Mapping[str, Any], hardware: Path | None) -> list[str]:
    """For people: figures beside limit and price, what failed, what was left out; writes `hardware`."""
    from gpu_checks.report import figures_of, fit_machine, machine_of, readable, table, unfit

    from rlhfuse.costs.hardware import save_hardware

    figures, checks, facts = figures_of(report["checks"]), report["checks"], report["environment"]
    lines = [f"{sum(check['ok'] for check in checks)} of {len(checks)} checks are good"]
    for check in (check for check in checks if not check["ok"]):
        first, *rest = str(check["detail"]).strip().splitlines() or [""]
        lines.append(f"failed: {check['name']}: {first[:200]}{f' ... {rest[-1][:200]}' if rest else ''}")
    lines += [line for c in checks if isinstance(c["detail"], dict) for line in c["detail"].get("lines", ())]
    if skipped := [c["name"] for c in checks if isinstance(c["detail"], dict) and "skipped" in c["detail"]]:
        lines.append(f"skipped, as their results say why: {', '.join(skipped)}")
    if left_out := report["left_out"]:
        lines.append(f"left out: {', '.join(left_out)}; --done goes on with them")
    lines += [f"not to be seen here: {text}" for text in report["not_shown"]]
    if not figures:
        return lines
    if not report["cuda"]:
        told = [f"{name}: {readable(figure.seconds)}" for name, figure in figures.items()]
        return [*lines, "", "seconds of a CPU in the GPU's place, which mean nothing:", *told]
    sheet, assumed = machine_of(facts)
    source = f"{facts['name']}, on {datetime.date.today().isoformat()}"
    fitted = fit_machine(figures, sheet, assumed, source)
    lines += ["", f"beside the data sheet of {sheet.name}, and the planner's prices as assumed and as fitted to this:"]
    lines += ["", *table(figures.values(), sheet, (assumed, fitted)), ""]
    lines += unfit(figures)
    for name in fitted.measured:
        lines.append(f"{name}: {getattr(fitted, name):.4g} here, assumed {getattr(assumed, name):.4g}")
    if hardware and fitted.measured:
        save_hardware(hardware, fitted)
        lines.append(f"{hardware} is written: plan and train with trainer.hardware=measured:{hardware}")
    else:
        lines.append("with --hardware FILE, and --done of this call's --out, the planner's file of this is written")
    return lines


def run() -> None:
    """The installed program."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_program(main, tear_down=False)


if __name__ == "__main__":
    run()
