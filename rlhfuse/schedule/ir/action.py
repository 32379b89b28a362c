"""One thing a node or a rank does: compute a micro-batch on a pipeline stage, or move its data.

An action prints as `critic.0:2F5` (pipeline, its stage, kind, micro-batch) and parses back. The kinds about a stage's
weights, TE, RG and ST, have no micro-batch: `actor:0RG`. Paper: section 5.2, the subtask S_ij.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from rlhfuse.base.errors import InputError


class Kind(str, Enum):
    """What an action does; the value is its text."""

    F = "F"  # forward
    B = "B"  # backward: of the inputs only when the weight gradient is split off
    W = "W"  # weight gradient
    SF = "SF"  # send an activation to the next stage
    RF = "RF"  # receive an activation from the previous stage
    SB = "SB"  # send a gradient to the previous stage
    RB = "RB"  # receive a gradient from the next stage
    TE = "TE"  # sum the gradients of tied embeddings over the first and the last stage
    RG = "RG"  # start to reduce a stage's gradients over its data-parallel ranks
    ST = "ST"  # step of the model's optimizer: waits for its RGs, then norm, clip, update, gather

    def __str__(self) -> str:
        return self.value

    __hash__ = str.__hash__  # Enum hashes in Python code, and actions are hashed by the million


COMPUTE = (Kind.F, Kind.B, Kind.W)
SENDS = (Kind.SF, Kind.SB)
RECEIVES = (Kind.RF, Kind.RB)
SEND_OF = {Kind.F: Kind.SF, Kind.B: Kind.SB}
RECEIVE_OF = {Kind.F: Kind.RF, Kind.B: Kind.RB}
_TEXT = re.compile(r"([^\s:<>]+):(\d+)(?:(SF|RF|SB|RB|F|B|W)(\d+)|(TE|RG|ST))")


class Action(NamedTuple):
    """`stage` is the pipeline's own stage number, not a node or a rank; TE, RG and ST have no micro-batch."""

    pipeline: str
    stage: int
    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.pipeline}:{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Inverse of `str`. Raises InputError on any other text."""
        match = _TEXT.fullmatch(text.strip())
        if not match:
            raise InputError(
                f"action {text!r} is not of the form pipeline:stageKINDmicrobatch, such as critic.0:2F5 or actor:0RG"
            )
        if match[5]:
            return Action(match[1], int(match[2]), Kind(match[5]))
        return Action(match[1], int(match[2]), Kind(match[3]), int(match[4]))
