"""Token ids to text, for stop texts; the rest of the engine knows ids alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def read_tokenizer(path: Path) -> Callable[[list[int]], str] | None:
    """Token ids to text with the folder's tokenizer.json; None where there is no such file."""
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)
