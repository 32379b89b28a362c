"""Rehearse ranks of a run on GPUs, on a machine without: shapes, devices, dtypes and memory, nothing is computed.

    python tools/rehearse.py --config run.yaml --world-size N [--stages | --rank R] [--phase NAME ...] [key=value ...]

Each rank is a process of less than a GiB that runs the run's own code at its true sizes. Of the models it needs
config.json alone. --stages (default): one rank of each combination of stages. Prints memory by phase, planned and
measured, and what held it at the peak. Exits with 2 where a phase exceeds the limit of a rank, with 1 where NCCL
would refuse something.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program import run_program
from rehearsal.shim import refuse_unless_possible
from rehearsal.stages import PHASES, WHOLE, distinct_ranks, planned_bytes, rehearsal_draft, rehearse

from rlhfuse.base.errors import EXIT_BAD_INPUT, EXIT_FAILED, InputError
from rlhfuse.config.load import load_config
from rlhfuse.decisions.layouts import planned_world_size
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport

GIB = 2**30
ROWS = 12  # of what held memory


def main() -> int:
    parser = argparse.ArgumentParser(description="Rehearse ranks of a run on GPUs, on a machine without.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument("--world-size", type=int, help="ranks; default WORLD_SIZE, or the product of actor_train")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, help="this rank alone")
    which.add_argument("--stages", action="store_true", help="one rank of each combination of stages (default)")
    parser.add_argument(
        "--phase", action="append", choices=PHASES, help="this part of an iteration alone, after the start; repeatable"
    )
    args = parser.parse_intermixed_args()
    refuse_unless_possible()
    config = load_config(args.config, args.overrides)
    draft = rehearsal_draft(config, planned_world_size(config, args.world_size))
    if args.rank is not None and not 0 <= args.rank < draft.run.world_size:
        raise InputError(
            f"--rank {args.rank} is none of {draft.run.world_size} ranks; give 0 to {draft.run.world_size - 1}"
        )
    plan = make_plan(draft)
    memory = PlanReport.of(plan).memory
    limit = memory.limit - memory.process_bytes  # contexts and communicators are not counted here
    ranks = distinct_ranks(draft) if args.rank is None else (args.rank,)
    print(f"rehearsing rank {', '.join(map(str, ranks))} of {draft.run.world_size}, one after the other", flush=True)
    reports = []
    for rank in ranks:
        try:
            found = rehearse(Path(args.config), args.overrides, plan, rank, args.phase or WHOLE, _tell)
        except subprocess.CalledProcessError as error:
            return error.returncode
        reports.append(RankReport(found, planned_bytes(draft, plan, rank), limit))
        print(reports[-1].text(), flush=True)
    fullest = max(reports, key=lambda report: report.fullest["peak"])
    print(fullest.table())
    for report in reports:
        for name in report.too_full:
            peak, limit = report.peaks[name]["peak"], report.limit
            has = f"a rank has {limit / GIB:.1f} GiB beside its process"
            print(f"rank {report.found['rank']}: {name} takes {peak / GIB:.1f} GiB, {has}")
    if any(report.too_full for report in reports):
        return EXIT_BAD_INPUT
    return EXIT_FAILED if any(report.found["problems"] for report in reports) else 0


def _tell(line: str) -> None:
    print(f"  {line}", flush=True)


@dataclass(frozen=True)
class RankReport:
    """One rank's rehearsal, as a dict of RankRehearsal, beside its plan: phase -> bytes of the device."""

    found: Mapping[str, Any]
    planned: Mapping[str, int]
    limit: float

    @property
    def peaks(self) -> dict[str, Mapping[str, Any]]:
        """The iteration that took most, of each phase, in order."""
        peaks: dict[str, Mapping[str, Any]] = {}
        for phase in self.found["phases"]:
            if phase["phase"] not in peaks or phase["peak"] > peaks[phase["phase"]]["peak"]:
                peaks[phase["phase"]] = phase
        return peaks

    @property
    def fullest(self) -> Mapping[str, Any]:
        return max(self.found["phases"], key=lambda phase: phase["peak"])

    @property
    def too_full(self) -> tuple[str, ...]:
        """Phases above the limit of a rank."""
        return tuple(name for name, phase in self.peaks.items() if phase["peak"] > self.limit)

    def text(self) -> str:
        """Planned and measured by phase; "off by" is the plan's, as at the end of a run."""
        title, planned_host = f"memory of rank {self.found['rank']}", self.planned.get("host")
        lines = [f"{title:22} {'planned':>10} {'measured':>10} {'off by':>7}"]
        for name, phase in self.peaks.items():
            planned, over = self.planned.get(name, 0), "  over the limit" if name in self.too_full else ""
            error = f"{planned / phase['peak'] - 1:+7.2%}" if planned else f"{'':7}"
            shown = f"{planned / GIB:6.3f} GiB" if planned else f"{'not':>6}    "
            lines.append(f"{name:22} {shown} {phase['peak'] / GIB:6.3f} GiB {error}{over}")
        last = max(self.found["phases"], key=lambda phase: phase["host"])
        most = max(phase["host_peak"] for phase in self.found["phases"])
        host = f"{planned_host / GIB:6.3f} GiB" if planned_host else " " * 10
        measured = f"{last['host'] / GIB:6.3f} GiB, {last['reserved'] / GIB:.3f} reserved, {most / GIB:.3f} at most"
        lines.append(f"{'host memory':22} {host} {measured}")
        if moved := self.found["moved"]:
            lines.append(f"{moved} samples came from other instances or went there")
        if paused := self.found["paused"]:
            lines.append(f"{paused} samples paused for a tool")
        problems = [f"{times} times: {what}" for what, times in self.found["problems"].items()]
        return "\n".join((*lines, *self._reads(), *problems))

    def table(self) -> str:
        """What held the memory at the highest peak."""
        phase = self.fullest
        head = f"rank {self.found['rank']} at its peak, {phase['phase']} of iteration {phase['iteration']}:"
        rows = [f"  {count / GIB:7.3f} GiB  {where:10} {what}" for where, what, count in phase["table"][:ROWS]]
        rest = phase["peak"] - sum(count for *_, count in phase["table"][:ROWS])
        return "\n".join((head, *rows, f"  {rest / GIB:7.3f} GiB  in smaller parts"))

    def _reads(self) -> Sequence[str]:
        lines = []
        for name, phase in self.peaks.items():
            if count := sum(phase["reads"].values()):
                most = sorted(phase["reads"].items(), key=lambda read: -read[1])[:3]
                lines.append(
                    f"{name}: the host waits {count} times for the device, most at "
                    + ", ".join(f"{where} ({times})" for where, times in most)
                )
        return lines


if __name__ == "__main__":
    run_program(main)
