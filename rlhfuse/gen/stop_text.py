"""Whether the newest token of a response completes a stop text.

Only the end of the response is turned into text, and more of it while that gives too few characters:

    text without the newest token   ... once upon a t
    text with it                    ... once upon a time, the        stop " ti" ends past the common part: it is new

A stop text may span tokens, lie inside one, and hold characters whose bytes are split over tokens: such a character
appears with its last byte. A stop text that was complete before the newest token does not count again. Knows nothing
of prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from os.path import commonprefix

_SLACK = 8  # characters at the start of the window that the cut in front of it may have changed


def completes_stop_text(tokens: list[int], stops: tuple[str, ...], detokenize: Callable[[list[int]], str]) -> bool:
    """Whether text(tokens) holds one of `stops`, ending past what it has in common with text(all but the last)."""
    wanted = max(map(len, stops)) + _SLACK
    window = wanted
    while len(before := detokenize(tokens[-window:-1])) < wanted and window < len(tokens):
        window *= 2  # tokens without text, or less than a character each
    text = detokenize(tokens[-window:])
    known = len(commonprefix((before, text)))
    return any(text.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in stops)
