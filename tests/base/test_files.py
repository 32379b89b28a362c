"""Files and folders appear whole or not at all."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import output_folder, remove_leftovers, write_text
from rlhfuse.models.hf_folder import save_tensors


def test_an_output_folder_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RuntimeError):
        with output_folder(out) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError
    assert not list(tmp_path.iterdir())
    for text in ("one", "two"):
        with output_folder(out, force=True) as folder:
            (folder / "file").write_text(text)
    assert (out / "file").read_text() == "two" and [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(InputError, match="--force"):
        with output_folder(out):
            pass


KILLED = """
import os, sys
from rlhfuse.base.files import output_folder, write_text
count, moment, replace = 0, int(sys.argv[2]), os.replace

def replace_or_die(*paths):
    global count
    count += 1
    if count == moment:
        os.kill(os.getpid(), 9)
    replace(*paths)

os.replace = replace_or_die
with output_folder(sys.argv[1], force=True) as folder:
    (folder / "file").write_text("two")
write_text(sys.argv[1] + ".json", "{}")
"""


@pytest.mark.parametrize("moment, left", [(1, "one"), (2, "one"), (3, "two")])
def test_a_killed_writer_leaves_the_old_or_the_new_one(programs, tmp_path, moment, left):
    out = tmp_path / "out"
    out.mkdir()
    (out / "file").write_text("one")
    assert programs.python("-c", KILLED, out, moment).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) > 1 or moment == 2
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (out / "file").read_text() == left


def test_a_folder_that_cannot_take_the_name_leaves_the_old_one(tmp_path, monkeypatch):
    out, replace = tmp_path / "out", os.replace
    out.mkdir()
    (out / "file").write_text("one")

    def refused(source, to):
        if str(source).endswith(".under-way"):
            raise OSError(5, "Input/output error")
        replace(source, to)

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(InputError, match="Input/output error"):
        with output_folder(out, force=True) as folder:
            (folder / "file").write_text("two")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (out / "file").read_text() == "one"


def test_a_folder_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda number: (calls.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    with output_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("one")
    assert calls == [str(folder / "file"), str(folder), "replace", str(tmp_path)]


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_has_the_mode_that_the_umask_leaves(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        write_text(tmp_path / "a.json", "one")
        write_text(tmp_path / "a.json", "two", durable=True)
        save_tensors({"a": torch.zeros(2)}, tmp_path / "a.safetensors", {})
        save_tensors({"a": torch.ones(2)}, tmp_path / "a.safetensors", {})
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {
        "a.json": mode,
        "a.safetensors": mode,
    }
    assert (tmp_path / "a.json").read_text() == "two" and load_file(tmp_path / "a.safetensors")["a"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["none/a.json", "folder", "a.json/b.json", "x" * 300])
def test_a_name_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(InputError, match=r"cannot write .*; give the path of a file in a writable folder"):
        write_text(tmp_path / name, "two")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.json", "folder"]
