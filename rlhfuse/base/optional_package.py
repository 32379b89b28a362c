"""Packages that a run can do without: whether one can be used is known once it is imported, not once it is found."""

from __future__ import annotations

import importlib


def import_obstacle(module: str, title: str) -> str:
    """Import `module` of an optional package, called `title`; why that is not possible, in one line, '' if it is."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module.partition(".")[0]:
            return f"{title} is not installed"
        return f"{title} cannot be imported: {error}"
    except Exception as error:  # whatever a broken installation raises: one for another torch lacks symbols
        return f"{title} cannot be imported: {' '.join(str(error).split()) or type(error).__name__}"
    return ""
