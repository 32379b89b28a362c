"""Rows of a table that somebody hands in: a file of jsonl (also .gz), json, csv, parquet or arrow, by its name."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import CHECK, open_file, read_lines, read_text
from rlhfuse.base.json_values import json_value

FORMATS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet", ".arrow")


def read_rows(path: str | Path, fix: str = CHECK) -> Iterator[tuple[int, Any]]:
    """(place, row) of each row: its line in jsonl and csv, else its number, from 1. What is no object is one, too.

    Raises InputError naming file, place and fix for what cannot be read.
    """
    name = Path(path).name.lower()
    readers = {".jsonl": _lines, ".jsonl.gz": _lines, ".json": _list, ".csv": _csv}
    for end in FORMATS:
        if name.endswith(end):
            return readers.get(end, _table)(path, fix)
    kind = "a folder" if Path(path).is_dir() else "of no known kind"
    raise InputError(f"{path} is {kind}; use one of {', '.join(FORMATS)}")


def _lines(path: str | Path, fix: str) -> Iterator[tuple[int, Any]]:
    for number, line in read_lines(path, fix):
        if line.strip():
            yield number, json_value(line, f"{path}:{number}", own=False)


def _list(path: str | Path, fix: str) -> Iterator[tuple[int, Any]]:
    rows = json_value(read_text(path, fix).strip() or "[]", str(path), own=False)
    if not isinstance(rows, list):
        raise InputError(f"{path}: must be a list of rows; for one object per line name it .jsonl")
    yield from enumerate(rows, start=1)


def _csv(path: str | Path, fix: str) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader((line for _, line in read_lines(path, fix)), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                fields = len(reader.fieldnames or ())
                raise InputError(f"{path}:{reader.line_num}: not {fields} fields as in the header")
            yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"{path}:{reader.reader.line_num}: not valid CSV ({error})") from None


def _table(path: str | Path, fix: str) -> Iterator[tuple[int, Any]]:
    import pyarrow  # here, because no other format needs it and loading takes a while
    import pyarrow.parquet

    kind = Path(path).suffix[1:].lower()
    with open_file(path, fix) as stream:
        try:
            if kind == "parquet":
                rows = pyarrow.parquet.read_table(stream).to_pylist()
            else:
                files = {b"ARROW1": pyarrow.ipc.open_file}  # others are streams, as of the datasets library
                opener = files.get(stream.read(6), pyarrow.ipc.open_stream)
                rows = opener(stream.seek(0) or stream).read_all().to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise InputError(f"{path} is not a readable {kind} file ({' '.join(str(error).split())})") from None
    yield from enumerate(rows, start=1)
