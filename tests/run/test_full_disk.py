"""A disk that is full: one line says which file and what to do, and what was written before stays as it was."""

import errno
import os
import re
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from run_report.run_files import load_trace
from testkit.programs import KILLED, ended
from testkit.runs_table import assert_same_bits, curves_of, metrics_of
from testkit.small_disk import small_disk, small_files
from testkit.tiny import write_checkpoint, write_run

from rlhfuse.base.clock import Span
from rlhfuse.base.errors import InputError, writing
from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.hf import hf_tensors, load_weights
from rlhfuse.models.hf_folder import export_checkpoint
from rlhfuse.monitor.loggers import TensorBoardLogger
from rlhfuse.monitor.metrics import MetricsWriter, read_metrics
from rlhfuse.monitor.samples import SampleText, SampleWriter, read_samples
from rlhfuse.monitor.trace import save_trace
from rlhfuse.run.checkpoint.checkpoint import Checkpoint, checkpoints_in

ROOM = 128 << 10  # bytes
REASONS = {"disk": "No space left on device", "limit": "File too large"}


@pytest.fixture(params=REASONS)
def narrow(request, tmp_path):
    """(a folder in which ROOM bytes find room, a context in which more are refused, the system's reason)."""
    reason = REASONS[request.param]
    if request.param == "limit":
        yield tmp_path, small_files(ROOM), reason
    else:
        with small_disk(tmp_path / "disk", ROOM) as folder:
            yield folder, nullcontext(), reason


def refused(write, narrow, file: Path) -> int:
    """Calls write(0), write(1), ... until it is refused, as it should be; returns how often it was not."""
    _, limit, reason = narrow
    with limit, pytest.raises(InputError) as caught:
        for number in range(1000):
            write(number)
    assert str(caught.value) == f"cannot write {file}: {reason}; free space there"
    assert number > 0
    return number


def files_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def samples(iteration: int) -> list[SampleText]:
    return [SampleText(iteration, number, "p", "r" * 700, 0.0, 1, "stop") for number in (0, 1)]


@pytest.mark.parametrize(
    "kind, of_iteration, read",
    [(MetricsWriter, lambda i: {"iteration": i, "x": "y" * 3001}, read_metrics), (SampleWriter, samples, read_samples)],
)
def test_lines_that_found_room_stay_whole(narrow, kind, of_iteration, read):
    """Samples of an iteration are written all or none."""
    file = narrow[0] / "lines.jsonl"
    with closing(kind(file)) as writer:
        done = refused(lambda i: writer.write(of_iteration(i)), narrow, file)
        assert writer.position() == file.stat().st_size and file.read_bytes().endswith(b"}\n")
    wanted = [of_iteration(i) for i in range(done)]
    assert read(file) == (wanted if kind is MetricsWriter else [one for texts in wanted for one in texts])


# the writer thread of TensorBoard prints its own error, too
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_shows_all_that_found_room(narrow):
    logger = TensorBoardLogger(narrow[0], 0)
    done = refused(lambda i: logger.log({"iteration": i} | {f"a/{n}": i + n for n in range(50)}), narrow, narrow[0])
    assert curves_of(narrow[0], "a/49") == [[(i, i + 49.0) for i in range(done)]]


def test_a_trace_that_finds_no_room_leaves_the_one_before(narrow):
    folder, _, _ = narrow
    file = folder / "trace.json"

    def spans(number: int) -> list[Span]:
        return [Span("x", "x", 0, float(i), i + 1.0) for i in range(1 + 60 * number)]

    done = refused(lambda i: save_trace(spans(i), file), narrow, file)
    assert load_trace(file) == spans(done - 1)
    assert files_in(folder) == ["trace.json"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, spec, weights) of a model of 200 kB."""
    like = write_checkpoint(tmp_path_factory.mktemp("model") / "like", num_hidden_layers=1)
    spec = ModelSpec.from_config(like)
    return like, spec, load_weights(like, spec)


def test_an_export_that_finds_no_room_leaves_the_one_before(narrow, model):
    folder, limit, reason = narrow
    like, spec, weights = model
    out = folder / "actor"
    out.mkdir()
    (out / "config.json").write_text("{}")
    tensors = hf_tensors(weights, spec, False)
    with limit, pytest.raises(InputError, match=rf"cannot write .*actor.*safetensors: {reason}; free space there"):
        export_checkpoint(tensors, False, like, out)
    assert files_in(folder) == ["actor"] and files_in(out) == ["config.json"]
    assert next(tensors, None) is None, "ranks that send tensors are left waiting"


@pytest.mark.parametrize("number, fix", [(errno.ENOSPC, "free space there"), (errno.EACCES, "make it writable")])
def test_the_fix_is_that_of_the_error(number, fix):
    with pytest.raises(InputError) as caught, writing("a/b"):
        raise OSError(number, os.strerror(number))
    assert str(caught.value) == f"cannot write a/b: {os.strerror(number)}; {fix}"


# whole runs -----------------------------------------------------------------------------------------------------

FULL = (  # when the disk is full (testkit/killed_training.py); lines, checkpoint and export then race to meet it
    "0 full 1 start.1, .*train mini-batch 1",
    "0 full 2 file begins",
    "0 full 1 exporting models",
)
DISK = 64 << 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_end_by_one_line_and_go_on_when_there_is_room(programs, tmp_path):
    config = write_run(tmp_path, trainer__save_every=1, trainer__iterations=4, trainer__tensorboard=True)
    whole = tmp_path / "whole"
    programs.trained(config, f"trainer.output_dir={whole}")
    with small_disk(tmp_path / "disk", DISK) as disk:
        run_dir = disk / "run"
        settings = [f"trainer.output_dir={run_dir}", "trainer.resume=auto"]
        for moment in FULL:
            process = programs.train(config, *settings, programs=(KILLED,), KILL_AT=moment, FULL_DISK=str(disk))
            out = ended(process)
            lines = [line.removeprefix("error: ") for line in out.splitlines() if line.startswith("error: ")]
            assert process.returncode == 1 and "exitcode  : 2" in out, out
            assert len(lines) == 1 and out.count("Traceback") == 1 and "watchdog" not in out, out  # torchrun's own
            assert out.splitlines()[-2] == f"  traceback : error: {lines[0]}", out
            good = checkpoints_in(run_dir)[-1]
            expected = rf"(rank \d: )?cannot write {run_dir}/\S+: No space left on device; free space there; "
            expected += rf"the last good checkpoint is {good}: start again with trainer.resume=auto"
            assert re.fullmatch(expected, lines[0]), lines[0]
            print(f"{moment}: {lines[0]}")
            files = [one.name for one in run_dir.rglob("*")]
            assert not [name for name in files if name.startswith(".") or ".partial" in name], files
            assert Checkpoint.open(good).metrics_bytes <= (run_dir / "metrics.jsonl").stat().st_size
            assert not (run_dir / "finished.json").exists()
            (disk / "ballast").unlink()
        programs.trained(config, *settings)
        assert [row["iteration"] for row in metrics_of(run_dir)] == [0, 1, 2, 3]
        assert (run_dir / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
        assert len(assert_same_bits(whole, run_dir)) == 3
