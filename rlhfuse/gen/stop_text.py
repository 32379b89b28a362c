"""Stop texts: token ids to text, and whether the newest token of a response completes one.

A stop text may span tokens, lie inside one, and hold characters whose bytes are split over tokens: such a character
appears with its last byte. A stop text that was complete before the newest token does not count again.
"""

from __future__ import annotations

from collections.abc import Callable
from os.path import commonprefix
from pathlib import Path

from rlhfuse.base.files import is_listed, open_file

_SLACK = 8  # characters at the start of the window that the cut in front of it may have changed


def read_tokenizer(folder: Path) -> Callable[[list[int]], str] | None:
    """Token ids to text with the folder's tokenizer.json; None where there is no such file."""
    file = folder / "tokenizer.json"
    if not is_listed(file):
        return None
    open_file(file).close()
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
    return _find(before, detokenize(tokens[-window:]), stops) is not None


def _find(before: str, text: str, stops: tuple[str, ...]) -> int | None:
    """Where the first of `stops` begins in `text` that ends past what it has in common with `before`."""
    common = len(commonprefix((before, text)))
    places = [text.find(stop, max(0, common - len(stop) + 1)) for stop in stops]
    return min((at for at in places if at >= 0), default=None)


def text_before_stop(tokens: list[int], stops: tuple[str, ...], decode: Callable[..., str]) -> str:
    """Text of a finished response without special tokens, cut before the stop text that its last token completed.

    `decode`: a tokenizer's, of tokens and `skip_special_tokens`. Stop texts may hold special tokens.
    """
    whole = decode(tokens, skip_special_tokens=False) if stops else ""
    at = _find(decode(tokens[:-1], skip_special_tokens=False), whole, stops) if stops else None
    if at is None:
        return decode(tokens, skip_special_tokens=True)
    kept = len(tokens) - 1  # tokens that are text before the stop text alone; the next is so in part
    while not whole[:at].startswith(before := decode(tokens[:kept], skip_special_tokens=False)):
        kept -= 1
    return decode(tokens[:kept], skip_special_tokens=True) + whole[len(before) : at]
