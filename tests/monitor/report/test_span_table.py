"""Predicted and measured work of every rank, added up by hand."""

import pytest

from rlhfuse.errors import InputError
from rlhfuse.monitor.report.span_table import SpanRow, span_rows, span_table
from rlhfuse.monitor.trace import Span


def span(kind, rank, start, seconds, group="measured"):
    return Span(kind, kind, rank, start, start + seconds, group)


def test_work_is_added_up_over_iterations():
    spans = [span("reshard", rank, start, 1.0) for rank in (0, 1) for start in (0.0, 10.0)]
    spans += [span("reshard", 0, 10.0, 0.5, "predicted"), span("score", 0, 2.0, 3.0), span("score", 0, 5.0, 1.0)]
    rows = span_rows(spans)
    assert rows == (SpanRow(0, "reshard", 0.25, 1.0), SpanRow(0, "score", 0.0, 2.0), SpanRow(1, "reshard", 0.0, 1.0))
    assert "   0 reshard      1.000 s   0.250 s   -0.750 s" in span_table(rows)


def test_a_trace_without_iterations_is_refused():
    for spans in ([], [span("score", 0, 0.0, 1.0)]):
        with pytest.raises(InputError, match="no measured 'reshard'"):
            span_rows(spans)
