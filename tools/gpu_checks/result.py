"""How two results are compared, and how a comparison fails."""

from __future__ import annotations

import json
from typing import Any

import torch

# Largest difference from the reference, as a part of its largest number.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class CheckFailed(Exception):
    """A comparison outside its bound; the message says what was compared."""


def require(good: bool, detail: Any) -> Any:
    """`detail`, or CheckFailed showing it."""
    if not good:
        raise CheckFailed(json.dumps(detail))
    return detail


def relative(actual: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    """Largest difference, as a part of the largest number wanted."""
    assert actual is not None and wanted is not None, "nothing to compare"
    wanted = wanted.detach().double().cpu()
    return float((actual.detach().double().cpu() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
