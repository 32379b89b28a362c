"""One line per iteration for the person who watches: reward, KL, lengths, speed, where the time went.

    iteration  3/10  score +0.412  kl 0.0131  length 87.2 (3% cut)  4,210 tokens/s  2.1 s: gen 52%, train 31%, ...

Coloured by rich on a terminal, the same words without colour in a file. Reads the metrics of the iteration and
nothing else; what is missing in them is left out of the line.
"""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.text import Text

from rlhfuse.monitor.metrics import Metrics


def progress_parts(metrics: Metrics, iterations: int) -> list[tuple[str, str]]:
    """(text, style) of each piece of the line; `iterations` is the number planned."""
    width = len(str(iterations))
    parts = [(f"iteration {int(metrics['iteration']):{width}d}/{iterations}", "bold")]
    for name, text, style in (
        ("critic/score/mean", "score {:+.3f}", "green"),
        ("actor/ref_kl", "kl {:.4f}", "yellow"),
        ("response_length/mean", "length {:.1f}", ""),
        ("response_length/clip_ratio", "({:.0%} cut)", "dim"),
        ("perf/throughput", "{:,.0f} tokens/s", "cyan"),
    ):
        if metrics.get(name) is not None:
            parts.append((text.format(metrics[name]), style))
    if metrics.get("timing_s/step"):
        parts.append((f"{metrics['timing_s/step']:.2f} s{_shares(metrics)}", "dim"))
    return parts


def _shares(metrics: Metrics) -> str:
    """Parts of the iteration's time, largest first; what is below one percent is left out."""
    whole = metrics["timing_s/step"]
    times = {
        name.removeprefix("timing_s/"): value / whole
        for name, value in metrics.items()
        if name.startswith("timing_s/") and name != "timing_s/step" and value is not None and value >= 0.01 * whole
    }
    ordered = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    return ": " + ", ".join(f"{name} {share:.0%}" for name, share in ordered) if ordered else ""


class ProgressPrinter:
    """Prints each iteration's line; on a terminal with colour."""

    def __init__(self, iterations: int, stream: TextIO = sys.stdout) -> None:
        self._iterations = iterations
        self._console = Console(file=stream, highlight=False, soft_wrap=True)

    def print(self, metrics: Metrics) -> None:
        self._console.print(Text("  ").join(Text(*part) for part in progress_parts(metrics, self._iterations)))
