"""Whether two runs did the same: their metrics number by number, their exported weights bit by bit.

Only what depends on the clock, or on how the work was fused, begun ahead and cut into micro-batches rather than on what
was computed, is left out: keys under IGNORED. Everything else must be equal, because fusion moves work in time and
changes no number (paper section 4 and 5: synchronous PPO with the same samples and gradients).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlhfuse.base.errors import InputError
from rlhfuse.monitor.metrics import read_metrics
from rlhfuse.tasks.role import LEARNERS

TIMES = ("timing_s/", "forecast_s/", "forecast_blind_s/", "perf/", "actor/mfu", "agent_loop/", "lengths/turns", "paced")
IGNORED = (*TIMES, "fusion/", "speculation/", "global_seqlen/", "training/filter_groups/")
EXPORTS = tuple(f"{folder}{role}" for folder in ("", "best/") for role in LEARNERS)


@dataclass(frozen=True)
class Difference:
    """Where two runs part; `size` is |a - b| (the largest of a tensor), None where that means nothing."""

    where: str
    a: str
    b: str
    size: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One thing compared: how many entries, and what differs, in order."""

    what: str
    entries: int
    differences: tuple[Difference, ...]

    @property
    def largest(self) -> float:
        return max((d.size for d in self.differences if d.size is not None), default=0.0)


def compare_runs(a: str | Path, b: str | Path) -> list[Comparison]:
    """Compare two run directories. Raises InputError when one is none, or a file in it cannot be read."""
    first, second = Path(a), Path(b)
    for run in (first, second):
        if not run.is_dir():
            raise InputError(f"{run} is no run directory; give a trainer.output_dir")
    found = [compare_metrics(first / "metrics.jsonl", second / "metrics.jsonl")]
    for name in EXPORTS:
        folders = first / "export" / name, second / "export" / name
        if any(folder.is_dir() for folder in folders):
            found.append(replace(compare_exports(*folders), what=f"export/{name}"))
    return found


def compare_metrics(a: Path, b: Path) -> Comparison:
    """Iterations are matched by number; a metric or iteration that one side lacks is a difference."""
    rows_a, rows_b = ({row["iteration"]: row for row in read_metrics(file)} for file in (a, b))
    if not rows_a and not rows_b:
        raise InputError(f"{a} and {b} hold no iteration; compare runs that finished at least one")
    entries, differences = 0, []
    for iteration in sorted(rows_a.keys() | rows_b.keys()):
        row_a, row_b = rows_a.get(iteration), rows_b.get(iteration)
        if row_a is None or row_b is None:
            entries += 1
            differences.append(Difference(f"iteration {iteration}", *_presence(row_a, row_b)))
            continue
        keys = [key for key in sorted(row_a.keys() | row_b.keys()) if not key.startswith(IGNORED)]
        entries += len(keys)
        differences += [_compare_values(f"iteration {iteration} {key}", row_a, row_b, key) for key in keys]
    return Comparison("metrics", entries, tuple(filter(None, differences)))


def _compare_values(where: str, row_a: dict[str, Any], row_b: dict[str, Any], key: str) -> Difference | None:
    if key not in row_a or key not in row_b:
        return Difference(where, *_presence(row_a.get(key), row_b.get(key)))
    a, b = row_a[key], row_b[key]
    # repr, because -0.0 == 0.0 and 1 == True; equal text means equal bits
    if repr(a) == repr(b):
        return None
    numbers = all(isinstance(value, (int, float)) for value in (a, b))
    return Difference(where, repr(a), repr(b), abs(a - b) if numbers else None)


def _presence(a: Any, b: Any) -> tuple[str, str]:
    return ("missing" if a is None else "present", "missing" if b is None else "present")


def compare_exports(a: Path, b: Path) -> Comparison:
    """Every tensor of every *.safetensors file, by name, whatever file of the folder it lies in."""
    places_a, places_b = _tensors_of(a), _tensors_of(b)
    names = sorted(places_a.keys() | places_b.keys())
    differences = []
    for name in names:
        if name in places_a and name in places_b:
            differences.append(_compare_tensors(name, _read(places_a[name], name), _read(places_b[name], name)))
        else:
            differences.append(Difference(name, *_presence(places_a.get(name), places_b.get(name))))
    return Comparison(f"export/{a.name}", len(names), tuple(filter(None, differences)))


def _tensors_of(folder: Path) -> dict[str, Path]:
    return {name: file for file in sorted(folder.glob("*.safetensors")) for name in _names(file)}


def _names(file: Path) -> Iterator[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield from opened.keys()
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is not a whole safetensors file ({error}); export the run again") from None


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)


def _compare_tensors(name: str, a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    kinds = [f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.") for tensor in (a, b)]
    if kinds[0] != kinds[1]:
        return Difference(name, kinds[0], kinds[1])
    changed = (_bytes(a) != _bytes(b)).any(-1).flatten()  # one entry per element: any byte of it
    if not changed.any():
        return None
    first = int(changed.nonzero()[0])
    flat_a, flat_b = a.flatten().double(), b.flatten().double()
    size = (flat_a - flat_b).abs().nan_to_num(float("inf")).max().item()
    where = f"{name}[{first}], {int(changed.sum())} of {a.numel()} elements"
    return Difference(where, repr(flat_a[first].item()), repr(flat_b[first].item()), size)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [elements, bytes of one]."""
    return tensor.contiguous().flatten().view(torch.uint8).view(tensor.numel(), tensor.element_size())
