"""What the CPU says, kept as files, so that a GPU machine neither computes nor compiles it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class References:
    """Values by name, in a folder of files; without a folder, or without the file, they are computed here."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """Numbers, lists, dicts and CPU tensors that `compute` gives, or gave where the files were written."""
        file = self._folder and self._folder / f"{name}.pt"
        if file and file.is_file():
            return torch.load(file, weights_only=True)
        return compute()

    @staticmethod
    def write(folder: Path, name: str, value: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(value, folder / f"{name}.pt")
