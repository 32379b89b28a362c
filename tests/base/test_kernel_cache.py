"""Kernels are compiled by another process, once."""

import errno
import importlib
import os
import re
import subprocess
import sys
from unittest import mock

import psutil
import pytest
from testkit.programs import PATHS, eventually

from rlhfuse.base.kernel_cache import KernelGroup, compile_apart, is_cached

pytestmark = pytest.mark.usefixtures("programs")  # compilers are processes

KERNEL = """
import os
import sys
import time
from pathlib import Path

from numba import njit


@njit(cache=True)
def double(number):
    return 2 * number


if __name__ == "__main__":
    with open(sys.argv[1], "a") as said:
        said.write(f"{os.getppid()}\\n")
    while len(sys.argv) > 2 and not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    from rlhfuse.base.kernel_cache import tell_what_is_compiled

    tell_what_is_compiled()
    import kernel_of_a_test

    kernel_of_a_test.double(1.0)
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """The kernel in a module of its own, its cache beside it."""
    (tmp_path / "kernel_of_a_test.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    yield importlib.import_module("kernel_of_a_test").double
    del sys.modules["kernel_of_a_test"]


def group(kernel, said) -> KernelGroup:
    return KernelGroup((kernel,), "kernel_of_a_test", (str(said),))


PARENT = """
import sys
from kernel_of_a_test import double
from rlhfuse.base.kernel_cache import KernelGroup, compile_apart

compile_apart([KernelGroup((double,), "kernel_of_a_test", tuple(sys.argv[1:]))])
"""


def test_a_compiler_ends_with_a_killed_parent(programs, kernel, tmp_path):
    said = tmp_path / "said"
    words = sys.executable, "-c", PARENT, said, tmp_path / "never"
    parent = programs.start(*words, PYTHONPATH=f"{tmp_path}{os.pathsep}{PATHS}")
    eventually(lambda: parent.poll() or (said.exists() and said.read_text()))
    compilers = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    assert len(compilers) == 1
    eventually(lambda: not compilers[0].is_running() or compilers[0].status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "a file system without locks"])
def test_what_another_process_compiled_is_loaded(kernel, tmp_path, capfd, monkeypatch, locks):
    if not locks:
        monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    said, progress = tmp_path / "said", []
    assert not is_cached(kernel)
    for _ in range(2):  # the second finds it
        compile_apart([group(kernel, said)], progress.append)
        assert is_cached(kernel)
    assert len(said.read_text().split()) == 1 and progress == ["compiling kernels: double"]
    begin, end = capfd.readouterr().err.splitlines()
    assert "once on this machine" in begin
    assert re.fullmatch(rf"compiled 1 kernels in \d+ s \(first use; kept in {re.escape(str(tmp_path))}.*\)", end)
    assert kernel(3.0) == 6.0
    assert sum(kernel.stats.cache_hits.values()) == 1 and not sum(kernel.stats.cache_misses.values())


def test_a_failure_there_is_one_here(kernel):
    with pytest.raises(subprocess.CalledProcessError):
        compile_apart([KernelGroup((kernel,), "kernel_of_a_test")])


def test_a_kernel_is_compiled_again_when_a_file_beside_it_changes_or_one_of_its_sources(kernel, tmp_path):
    said, other = tmp_path / "said", tmp_path / "other" / "functions.py"
    other.parent.mkdir()
    for number, helper in enumerate((tmp_path / "called_by_it.py", other), start=1):
        compile_apart([group(kernel, said)])
        helper.write_text("")
        later = helper.stat().st_mtime + 10
        os.utime(helper, (later, later))
        assert is_cached(kernel) == (helper == other) and not is_cached(kernel, (str(other),))
        os.utime(helper, (0, 0))
        assert len(said.read_text().split()) == number


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one core kernels are compiled one after another")
def test_groups_are_compiled_side_by_side(kernel, tmp_path):
    """Each ends when the other has begun."""
    one, other = tmp_path / "one", tmp_path / "other"
    words = [(str(one), str(other)), (str(other), str(one))]
    compile_apart([KernelGroup((kernel,), "kernel_of_a_test", pair) for pair in words])
    assert one.read_text() and other.read_text()
