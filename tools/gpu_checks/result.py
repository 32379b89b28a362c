"""The outcome of one check, and how a comparison fails."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Largest difference from the reference, as a part of its largest number.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Result:
    """One check's outcome; `detail` holds what was measured, or the error."""

    name: str
    ok: bool
    seconds: float
    detail: Any


class CheckFailed(Exception):
    """A comparison outside its bound; the message says what was compared."""


def require(good: bool, detail: Any) -> Any:
    """`detail`, or CheckFailed showing it."""
    if not good:
        raise CheckFailed(json.dumps(detail))
    return detail


def run_check(name: str, check: Callable[[], Any]) -> Result:
    """Run one check; whatever it raises is its result."""
    start = time.perf_counter()
    try:
        ok, detail = True, check()
    except Exception as error:  # recorded, so that the other checks still run
        place = traceback.extract_tb(error.__traceback__)[-1]
        ok, detail = False, f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {json.dumps(detail)}", file=sys.stderr, flush=True)
    return Result(name, ok, round(time.perf_counter() - start, 3), detail)


def relative(actual: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    """Largest difference, as a part of the largest number wanted."""
    assert actual is not None and wanted is not None, "nothing to compare"
    wanted = wanted.detach().double().cpu()
    return float((actual.detach().double().cpu() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
