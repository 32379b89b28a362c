"""Show a schedule.json: summary, text grid, picture, Chrome trace.

    python tools/show_schedule.py schedule.json --text --png schedule.png --trace schedule.trace.json
"""

from __future__ import annotations

import argparse

from rlhfuse.errors import run_program
from rlhfuse.schedule.bounds import latency_bound, memory_bound
from rlhfuse.schedule.builders import serial_makespan, serial_peak_memory
from rlhfuse.schedule.evaluate import evaluate
from rlhfuse.schedule.io import load_schedule, write_bytes, write_text
from rlhfuse.schedule.schedule import Schedule


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a fused-pipeline schedule.")
    parser.add_argument("schedule", help="schedule.json, made by tools/search_schedule.py")
    parser.add_argument("--text", action="store_true", help="print one line per node, tasks in execution order")
    parser.add_argument("--png", metavar="FILE", help="draw timeline and memory as PNG")
    parser.add_argument("--svg", metavar="FILE", help="draw timeline and memory as SVG")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace (one time unit = 1 microsecond)")
    arguments = parser.parse_args()
    schedule = load_schedule(arguments.schedule)
    print(summary(schedule))
    if arguments.text:
        print(schedule.text())
    if arguments.png or arguments.svg or arguments.trace:
        # Loading matplotlib takes a second that the text need not wait for.
        from rlhfuse.schedule.draw import chrome_trace, draw_schedule

        for path, file_format in ((arguments.png, "png"), (arguments.svg, "svg")):
            if path:
                write_bytes(path, draw_schedule(schedule, file_format))
        if arguments.trace:
            write_text(arguments.trace, chrome_trace(schedule))


def summary(schedule: Schedule) -> str:
    """What the schedule costs beside its bounds and the serial baseline."""
    problem, timeline = schedule.problem, evaluate(schedule)
    bound, serial = latency_bound(problem), serial_makespan(problem)
    lines = [
        f"{pipeline.name}: {pipeline.stages} stages on nodes {' '.join(map(str, pipeline.placement))}, "
        f"{pipeline.microbatches} micro-batches"
        for pipeline in problem.pipelines
    ]
    lines.append(
        f"makespan {timeline.makespan:g} (lower bound {bound:g}, serial 1F1B {serial:g}: "
        f"{serial / timeline.makespan:.3f} times as fast)"
    )
    lines.append(
        f"peak memory {timeline.peak_memory:g} (lower bound {memory_bound(problem, timeline.makespan):g}, "
        f"serial 1F1B {serial_peak_memory(problem):g}); per node "
        f"{' '.join(f'{peak:g}' for peak in timeline.node_peak_memory)}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main)
