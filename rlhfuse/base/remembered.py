"""A method that computes once: what it returns is kept for equal arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def remembered(method: Method) -> Method:
    """`method`, whose results live as long as its object: `functools.cache` would keep the object too.

    Arguments are hashable and given by position.
    """
    name = f"remembered {method.__qualname__}"

    @wraps(method)
    def once(self: Any, *arguments: Any) -> Any:
        known = vars(self).setdefault(name, {})
        if arguments not in known:
            known[arguments] = method(self, *arguments)
        return known[arguments]

    return once  # pyright: ignore[reportReturnType]  # which takes what `method` takes
