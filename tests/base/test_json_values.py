"""The one reader of small files: whatever is handed in is a value, or one line that names the file and the fix."""

import os

import pytest

from rlhfuse.base import files
from rlhfuse.base.errors import InputError
from rlhfuse.base.files import read_lines, read_text
from rlhfuse.base.json_values import DEEPEST, json_value, read_json
from rlhfuse.base.rows import read_rows

BROKEN = {  # what no file of this program may hold, and what is said of it
    "empty": (b"", "Expecting value at column 1"),
    "a word": (b"iteration-3", "not valid JSON .Expecting value"),
    "half": (b'{"a": [1,\n2', ":2: not valid JSON"),
    "two": (b"{} {}", "Extra data"),
    "deep": (b"[" * 100_000, f"nested more than {DEEPEST} deep"),
    "deep, whole": (b"[" * 200 + b"]" * 200, f"nested more than {DEEPEST} deep"),
    "deep objects": (b'{"a":' * 150 + b"1" + b"}" * 150, f"nested more than {DEEPEST} deep"),
    "digits": (b"[" + b"9" * 5001 + b"]", "a whole number of 5001 digits"),
    "more than a float": (b"1" + b"0" * 400, "a whole number of 401 digits"),
    "overflow": (b'{"a": 1e400}', "1e400 is no finite number"),
    "nan": (b'{"a": NaN}', "NaN is no finite number"),
    "infinity": (b"[-Infinity]", "-Infinity is no finite number"),
    "twice": (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' is there twice"),
    "binary": (b'{"a": "\xff\xfe"}', ":1: not UTF-8 .byte 0xff at 7."),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_one_line_with_file_and_fix(tmp_path, name):
    content, message = BROKEN[name]
    file = tmp_path / "a b ü.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_json(file, fix="make it again")
    said = str(caught.value)
    assert said.startswith(str(file)) and "\n" not in said and len(said) < 300
    assert said.endswith("; make it again") or "convert the file" in said


def test_what_is_whole_is_read(tmp_path):
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf{\r\n "a": [1.5, -2, "\xc3\xbc", null, true]\r\n}\r\n')  # a mark, and CRLF
    assert read_json(file) == {"a": [1.5, -2, "ü", None, True]}
    deepest = "[" * DEEPEST + "]" * DEEPEST
    assert json_value(deepest, "x") and json_value("[" + "[], {}, " * 200 + "1]", "x")
    assert json_value("[1e308, 12345678901234567890]", "x") == [1e308, 12345678901234567890]


def test_files_of_others_may_hold_what_nobody_reads():
    assert json_value('{"a": Infinity, "a": 1e400}', "x", own=False)["a"] == float("inf")
    with pytest.raises(InputError, match="x: not valid JSON .Exceeds the limit"):
        json_value("9" * 5001, "x", own=False)


NO_FILES = {  # how it comes about, and what is said of it
    "folder": (os.mkdir, "it is a folder"),
    "pipe": (os.mkfifo, "it is no regular file"),
    "device": (lambda path: os.symlink("/dev/zero", path), "it is no regular file"),
    "loop": (lambda path: os.symlink(path, path), "Too many levels of symbolic links"),
    "dangling": (lambda path: os.symlink("nowhere", path), "does not exist"),
    "missing": (lambda path: None, "does not exist"),
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("read", [read_json, read_text, lambda path, fix: list(read_lines(path, fix)), read_rows])
def test_what_is_no_file_is_named_and_never_waited_for(tmp_path, kind, read):
    path = tmp_path / "p.parquet"  # the one kind of rows that a library reads
    make, message = NO_FILES[kind]
    make(path)
    with pytest.raises(InputError, match=message) as caught:
        list(read(path, fix="give a file"))
    assert str(path) in str(caught.value) and str(caught.value).endswith("; give a file")


@pytest.mark.parametrize("name", ["a\0b.json", "x" * 300 + ".json", "half \ud83d.json"])
def test_a_name_that_no_file_can_have_is_one_line(tmp_path, name):
    with pytest.raises(InputError, match="cannot read "):
        read_json(tmp_path / name)


def test_permission_and_a_failing_disk_are_named(tmp_path, monkeypatch):
    """As root nothing is forbidden: the system's answers are put in its place."""
    file = tmp_path / "a.json"
    file.write_text("{}")

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "open", denied, raising=False)
    with pytest.raises(InputError, match=r"cannot read .*a.json: Permission denied; check the path"):
        read_json(file)

    class Failing(files.gzip.GzipFile):
        def read(self, *_):
            raise OSError(5, "Input/output error")

        readline = read

    monkeypatch.setattr(files, "open", lambda *_: Failing(fileobj=file.open("rb")), raising=False)
    for read in (read_json, lambda path: list(read_lines(path))):
        with pytest.raises(InputError, match=r"cannot read .*a.json: Input/output error"):
            read(file)


def test_a_file_and_a_line_have_an_end(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text('[1]\n"0123456789"\n')
    monkeypatch.setattr(files, "MOST_BYTES", 10)
    with pytest.raises(InputError, match="a.jsonl is larger than 10 bytes"):
        read_text(file)
    with pytest.raises(InputError, match="a.jsonl:2 is longer than 10 bytes"):
        list(read_lines(file))


def test_an_unfinished_last_line_is_left_out_where_lines_are_finished(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes('{"a": 1}\n{"b": "ü'.encode()[:-1])
    assert list(read_lines(file, finished=True)) == [(1, '{"a": 1}\n')]
    with pytest.raises(InputError, match="a.jsonl:2: not UTF-8"):
        list(read_lines(file))
