"""One thing a node or a rank does: compute a micro-batch on a pipeline stage, or move its data.

An action prints as `critic.0:2F5` (pipeline, its stage, kind, micro-batch) and parses back. Computing
kinds are F (forward), B (backward; the input gradient when the backward is split) and W (weight
gradient); S and R before F or B send and receive an activation or its gradient.

Knows nothing of nodes, times or ranks. Paper: section 5.2, the subtask S_ij.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from rlhfuse.errors import InputError


class Kind(str, Enum):
    """What an action does; the value is its text."""

    F = "F"  # forward
    B = "B"  # backward: of the inputs only when the weight gradient is split off
    W = "W"  # weight gradient
    SF = "SF"  # send an activation to the next stage
    RF = "RF"  # receive an activation from the previous stage
    SB = "SB"  # send a gradient to the previous stage
    RB = "RB"  # receive a gradient from the next stage

    def __str__(self) -> str:
        return self.value


COMPUTE = (Kind.F, Kind.B, Kind.W)
SEND_OF = {Kind.F: Kind.SF, Kind.B: Kind.SB}
RECEIVE_OF = {Kind.F: Kind.RF, Kind.B: Kind.RB}
_TEXT = re.compile(r"([^\s:<>]+):(\d+)(SF|RF|SB|RB|F|B|W)(\d+)")


class Action(NamedTuple):
    """`stage` is the pipeline's own stage number, not a node or a rank."""

    pipeline: str
    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.pipeline}:{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> "Action":
        """Inverse of `str`. Raises InputError on any other text."""
        match = _TEXT.fullmatch(text.strip())
        if not match:
            raise InputError(f"action {text!r} is not of the form pipeline:stageKINDmicrobatch, such as critic.0:2F5")
        return Action(match[1], int(match[2]), Kind(match[3]), int(match[4]))
