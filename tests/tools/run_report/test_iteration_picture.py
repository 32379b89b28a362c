"""A picture of an iteration that holds every rank."""

import pytest
from run_report.iteration_picture import draw_iteration

from rlhfuse.base.clock import Span
from rlhfuse.base.errors import InputError

SPANS = [
    Span("generate", "generate", 0, 0.0, 1.5, "measured", {"samples": 3}),
    Span("actor:0F0", "actor F", 1, 1.5, 1.75, "measured"),
    Span("generate", "generate", 0, 0.0, 1.25, "predicted"),
]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_picture_is_drawn(tmp_path, kind):
    draw_iteration(SPANS, tmp_path / f"iteration.{kind}", "iteration 3")
    data = (tmp_path / f"iteration.{kind}").read_bytes()
    assert data.startswith(b"\x89PNG" if kind == "png" else b"<?xml") and len(data) > 3000
    assert len(list(tmp_path.iterdir())) == 1


def test_without_spans_there_is_none(tmp_path):
    with pytest.raises(InputError, match="nothing to draw"):
        draw_iteration([], tmp_path / "x.png")
