"""Stop texts: token ids to text, and whether the newest token of a response completes one.

A stop text may span tokens, lie inside one, and hold characters whose bytes are split over tokens: such a character
appears with its last byte. A stop text that was complete before the newest token does not count again.
"""

from __future__ import annotations

from collections.abc import Callable
from os.path import commonprefix
from pathlib import Path

_SLACK = 8  # characters at the start of the window that the cut in front of it may have changed


def read_tokenizer(folder: Path) -> Callable[[list[int]], str] | None:
    """Token ids to text with the folder's tokenizer.json; None where there is no such file."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)


def completes_stop_text(tokens: list[int], stops: tuple[str, ...], detokenize: Callable[[list[int]], str]) -> bool:
    """Whether text(tokens) holds one of `stops`, ending past what it has in common with text(all but the last)."""
    # Only the end of the response is turned into text, and more of it while that gives too few characters.
    least = max(map(len, stops)) + _SLACK
    window = least
    while len(before := detokenize(tokens[-window:-1])) < least and window < len(tokens):
        window *= 2  # tokens without text, or less than a character each
    text = detokenize(tokens[-window:])
    common = len(commonprefix((before, text)))
    return any(text.find(stop, max(0, common - len(stop) + 1)) >= 0 for stop in stops)
