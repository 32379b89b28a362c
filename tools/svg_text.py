"""A figure as an element of a page, whose text stays text: the same figure gives the same, without dates or chance."""

from __future__ import annotations

import io
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

SVG_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "rlhfuse", "font.size": 9}


def svg_text(figure: Figure, ink: str = "#000000") -> str:
    """The <svg> element alone, without a background, whose `ink` is the colour of the page's text."""
    FigureCanvasSVG(figure)
    out = io.StringIO()
    with rc_context(SVG_STYLE):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace(ink, "currentColor")
