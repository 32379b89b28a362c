"""Writes a safetensors file; a refusal of the system comes out as the OSError that it is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    """`safetensors.torch.save_file`, which hides the system's error number in the text of its own error."""
    try:
        save_file(dict(tensors), str(file), metadata=dict(metadata))
    except SafetensorError as error:
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(file)) from None
        raise
