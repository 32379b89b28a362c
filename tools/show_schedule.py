"""Show a schedule.json: summary, text grid, picture, Chrome trace, the programs of all ranks.

python tools/show_schedule.py schedule.json --text --png schedule.png --trace schedule.trace.json
python tools/show_schedule.py schedule.json --png start.png --nodes 0-7 --from 0 --to 120
python tools/show_schedule.py schedule.json --programs actor=d1t1p8,critic=d2t1p4
python tools/show_schedule.py serial.json fused.json split.json --png beside.png
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from program import run_program
from search_output import percent_above

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_bytes, write_text
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.schedule.bounds.bounds import latency_bound, memory_bound
from rlhfuse.schedule.io import load_schedule
from rlhfuse.schedule.ir.evaluate import Timeline, evaluate, idle_share
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.schedule.ir.schedule import Schedule, grid
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.verify import verify
from rlhfuse.schedule.rules.builders import serial_makespan, serial_peak_memory


def main() -> None:
    arguments = parse_arguments()
    if len(arguments.schedule) > 1:
        show_several(arguments)
        return
    schedule = load_schedule(arguments.schedule[0])
    timeline = evaluate(schedule)
    first, last = node_range(arguments.nodes, schedule.problem.nodes)
    begin, end = arguments.begin, timeline.makespan if arguments.end is None else arguments.end
    if not begin < end:
        raise InputError(f"nothing lies between times {begin:g} and {end:g}; give --from the earlier one")
    print(summary(schedule, timeline))
    if arguments.text:
        print(text(schedule, timeline, range(first, last + 1), begin, end))
    if arguments.programs:
        print(programs_text(schedule, arguments.programs))
    if arguments.png or arguments.svg or arguments.trace:
        # Loading matplotlib takes a second that the text need not wait for.
        from schedule_drawing import View, chrome_trace, draw_schedule

        view = View(first, last, begin, end)
        for path, file_format in ((arguments.png, "png"), (arguments.svg, "svg")):
            if path:
                write_bytes(path, draw_schedule(schedule, file_format, view))
        if arguments.trace:
            write_text(arguments.trace, chrome_trace(schedule))


def show_several(arguments: argparse.Namespace) -> None:
    """Summaries, and the timelines in one picture. Raises InputError on what is there for one schedule alone."""
    alone = {
        "--text": arguments.text,
        "--programs": arguments.programs,
        "--trace": arguments.trace,
        "--nodes": arguments.nodes,
        "--from": arguments.begin,
        "--to": arguments.end is not None,
    }
    if asked := [name for name, value in alone.items() if value]:
        raise InputError(f"{asked[0]} is for one schedule, {len(arguments.schedule)} are given")
    schedules = {Path(file).stem: load_schedule(file) for file in arguments.schedule}
    if len(schedules) < len(arguments.schedule):
        raise InputError("schedules are told apart by their files' names; give each a name of its own")
    for name, schedule in schedules.items():
        print(f"{name}\n{summary(schedule, evaluate(schedule))}")
    for path, file_format in ((arguments.png, "png"), (arguments.svg, "svg")):
        if path:
            from schedule_drawing import draw_timelines

            write_bytes(path, draw_timelines(schedules, file_format))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Show a fused-pipeline schedule.")
    parser.add_argument(
        "schedule",
        nargs="+",
        help="schedule.json, made by tools/search_schedule.py; several are drawn below each other",
    )
    parser.add_argument("--text", action="store_true", help="print one line per node, tasks in execution order")
    parser.add_argument(
        "--programs",
        metavar="MODEL=LAYOUT,...",
        help="lower for these layouts, verify, and print one line per rank; such as actor=d1t1p8,critic=d2t1p4",
    )
    parser.add_argument("--png", metavar="FILE", help="draw timeline and memory as PNG")
    parser.add_argument("--svg", metavar="FILE", help="draw timeline and memory as SVG")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace of all (time unit = 1 microsecond)")
    parser.add_argument("--nodes", metavar="A-B", help="text and pictures: these nodes only; default all")
    parser.add_argument("--from", dest="begin", type=float, default=0.0, metavar="T", help="likewise: from then on")
    parser.add_argument("--to", dest="end", type=float, metavar="T", help="likewise: up to this time")
    return parser.parse_args()


def node_range(given: str | None, nodes: int) -> tuple[int, int]:
    """First and last node of `A-B` or `A`. Raises InputError on any other text and on nodes that are not there."""
    if given is None:
        return 0, nodes - 1
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", given)
    if not match:
        raise InputError(f"--nodes {given!r} is not of the form A-B, such as 0-7")
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < nodes:
        raise InputError(f"--nodes {given}: nodes are 0-{nodes - 1}, the smaller number first")
    return first, last


def text(schedule: Schedule, timeline: Timeline, nodes: range, begin: float, end: float) -> str:
    """One line per node with what runs between two times; with all of it `Schedule.parse` reads it back."""
    rows = {node: zip(schedule.orders[node], timeline.starts[node], timeline.ends[node]) for node in nodes}
    return grid({node: [action for action, *at in row if at[0] < end and at[1] > begin] for node, row in rows.items()})


def programs_text(schedule: Schedule, given: str) -> str:
    """The verified programs for the layouts in `given`, and what verification found.

    Raises InputError on text that is no MODEL=LAYOUT,... and on layouts that are not the schedule's.
    """
    layouts = {}
    for word in given.split(","):
        model, equals, layout = word.partition("=")
        if not equals or not model or model in layouts:
            raise InputError(f"--programs {given!r} is not of the form MODEL=LAYOUT,..., each model once")
        layouts[model] = ParallelLayout.parse(layout)
    backwards = any(pipeline.placement[0] > pipeline.placement[-1] for pipeline in schedule.problem.pipelines)
    ranks = rank_map(layouts, alternate=backwards)
    programs = lower(schedule, ranks)
    verified = verify(programs, schedule, ranks)
    queues = "one queue per rank" if verified.one_queue else "one queue per communicator"
    return f"{programs.text()}\nverified: {verified.transfers} transfers, {verified.collectives} collectives, {queues}"


def summary(schedule: Schedule, timeline: Timeline) -> str:
    """What the schedule costs beside its bounds and the serial baseline."""
    problem = schedule.problem
    bound, serial = latency_bound(problem), serial_makespan(problem)
    idle = idle_share(timeline, serial)
    least = memory_bound(problem, timeline.makespan)
    lines = [
        f"{pipeline.name}: {pipeline.stages} stages on nodes {' '.join(map(str, pipeline.placement))}, "
        f"{pipeline.microbatches} micro-batches"
        for pipeline in problem.pipelines
    ]
    lines.append(
        f"makespan {timeline.makespan:g} (lower bound {bound:g}, gap {percent_above(timeline.makespan, bound)}; "
        f"serial 1F1B {serial:g}, idle {idle:.0%}: {serial / timeline.makespan:.3f} times as fast)"
    )
    lines.append(
        f"peak memory {timeline.peak_memory:g} (lower bound {least:g}, "
        f"gap {percent_above(timeline.peak_memory, least)}; serial 1F1B {serial_peak_memory(problem):g}); per node "
        f"{' '.join(f'{peak:g}' for peak in timeline.node_peak_memory)}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main)
