"""Stop texts: token ids to text, and whether the newest token of a response completes one.

A stop text may span tokens, lie inside one, and hold characters whose bytes are split over tokens: such a character
appears with its last byte. A stop text that was complete before the newest token does not count again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    while len(before := _text(tokens[-window:-1], detokenize)) < least and window < len(tokens):
        window *= 2  # tokens without text, or less than a character each
    return _find(before, _text(tokens[-window:], detokenize), stops) is not None


def _text(tokens: list[int], detokenize: Callable[[list[int]], str]) -> str:
    """Text of tokens that follow others: of a whole text, decoders may drop the space that it begins with."""
    if "\ufffd" in (first := detokenize(tokens[:1])):  # part of a character, which no other may precede
        return detokenize(tokens)
    return detokenize([*tokens[:1], *tokens])[len(first) :]


def _find(before: str, text: str, stops: tuple[str, ...]) -> int | None:
    """Where the first of `stops` begins in `text` that ends past what it has in common with `before`."""
    common = len(commonprefix((before, text)))
    places = [text.find(stop, max(0, common - len(stop) + 1)) for stop in stops]
    return min((at for at in places if at >= 0), default=None)


def text_before_stop(tokens: list[int], stops: tuple[str, ...], decode: Callable[..., str]) -> str:
    """Text of a finished response without special tokens, cut before the stop text that its last token completed.

    `decode`: a tokenizer's, of tokens and `skip_special_tokens`. Stop texts may hold special tokens.
    """
    detokenize = partial(decode, skip_special_tokens=False)
    whole = _text(tokens, detokenize) if stops else ""
    at = _find(_text(tokens[:-1], detokenize), whole, stops) if stops else None
    if at is None:
        return decode(tokens, skip_special_tokens=True)
    kept = len(tokens) - 1  # tokens that are text before the stop text alone; the next is so in part
    while not whole[:at].startswith(before := _text(tokens[:kept], detokenize)):
        kept -= 1
    text = decode(tokens[:kept], skip_special_tokens=True) + whole[len(before) : at]
    return text if decode(tokens, skip_special_tokens=True).startswith(text[:1]) else text[1:]
