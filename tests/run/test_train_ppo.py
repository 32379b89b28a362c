"""The training program as a user starts it: torchrun, two ranks, small random models."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from testkit.tiny import write_run

ROOT = Path(__file__).resolve().parents[2]
STARTED: list[subprocess.Popen] = []
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def launch(config: Path, *overrides: str, under: Path | None = None) -> subprocess.Popen:
    """Start the job; `under` is a program that is given the training program to run."""
    programs = [str(path) for path in (under, ROOT / "tools/train_ppo.py") if path]
    command = [*TORCHRUN, *programs, "--config", str(config), *overrides]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), start_new_session=True
    )
    STARTED.append(job)
    return job


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """A test that fails in the middle of a job ends it: the ranks follow their launcher."""
    yield
    while STARTED:
        if (job := STARTED.pop()).poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def finish(job: subprocess.Popen, seconds: float = 540) -> str:
    try:
        out, _ = job.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    return out


def train(config: Path, *overrides: str) -> str:
    job = launch(config, *overrides)
    out = finish(job)
    assert job.returncode == 0, out
    return out


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def fused(config):
    """A fused run with R_t = the whole batch: every iteration meets while samples are unfinished."""
    run = config.parent / "fused"
    out = train(config, f"trainer.output_dir={run}", "fusion.threshold=16", "trainer.keep_checkpoints=3")
    return run, out


def test_a_run_leaves_what_it_promises(fused):
    run, out = fused
    assert "done: " in out and "R_t = 16: fusion.threshold says so" in out
    assert out.count("warning: without effect here: trainer.keep_checkpoints=3") == 1
    for name in ("config.yaml", "plan.json", "schedule.json", "metrics.jsonl", "trace.json", "costs.json"):
        assert (run / name).stat().st_size > 0
    metrics = rows(run)
    assert [row["iteration"] for row in metrics] == [0, 1, 2]
    assert all(row["fusion/threshold"] == 16 and row["fusion/instances"] == 2 for row in metrics)
    assert all(row["fusion/destinations"] == 1 and row["fusion/migrated_samples"] >= 1 for row in metrics)
    assert all(row["rollout/train_logprob_abs_diff"] < 1e-5 for row in metrics)
    groups = {
        event["args"]["name"]
        for event in json.loads((run / "trace.json").read_text())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert groups == {"measured"}


def test_the_export_loads_in_transformers_with_the_trained_weights(fused, config):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from rlhfuse.gen.engine import Engine, SamplingParams

    run, _ = fused
    actor = AutoModelForCausalLM.from_pretrained(run / "export" / "actor", dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(run / "export" / "critic", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(config.parent / "actor", dtype=torch.float32)
    assert critic.score.weight.shape == (1, 64)
    assert not torch.equal(actor.lm_head.weight, before.lm_head.weight)
    assert AutoTokenizer.from_pretrained(run / "export" / "actor")("w3")["input_ids"] == [1, 6]
    engine = Engine.from_pretrained(run / "export" / "actor")
    result = engine.generate([[1, 5, 9, 20]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    logits = actor(torch.tensor([[1, 5, 9, 20, *result.tokens]])).logits[0]
    chosen = logits[3:-1].log_softmax(-1).gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
    # greedy log-probabilities are those of the distribution itself
    assert torch.allclose(chosen, torch.tensor(result.logprobs), atol=1e-5)


def test_the_serial_run_has_the_same_bits(fused, config):
    run, _ = fused
    serial = config.parent / "serial"
    train(config, f"trainer.output_dir={serial}", "fusion.inter_stage=false", "fusion.intra_stage=false")
    assert all(row["fusion/destinations"] == 0 for row in rows(serial))
    compared = subprocess.run(
        [sys.executable, str(ROOT / "tools/compare_runs.py"), str(run), str(serial)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert compared.returncode == 0, compared.stdout + compared.stderr


def test_another_seed_is_told_apart(fused, config):
    run, _ = fused
    other = config.parent / "other"
    train(config, f"trainer.output_dir={other}", "trainer.seed=2", "trainer.iterations=1")
    compared = subprocess.run(
        [sys.executable, str(ROOT / "tools/compare_runs.py"), str(run), str(other)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert compared.returncode == 1, compared.stdout + compared.stderr


def test_a_killed_rank_ends_the_job_and_is_named(config):
    run = config.parent / "killed"
    job = launch(config, f"trainer.output_dir={run}", "trainer.iterations=10000")
    deadline = time.monotonic() + 540
    while not (run / "metrics.jsonl").exists() or len(rows(run)) < 2:
        assert job.poll() is None and time.monotonic() < deadline, "the job did not get going"
        time.sleep(0.2)
    victim = pid_of_rank(1, job.pid)
    os.kill(victim, signal.SIGKILL)
    out = finish(job)
    assert job.returncode != 0
    assert f"rank 1 (pid {victim}" in out and "died" in out
    assert not ranks_of(job.pid)


KILLER = """
import os, runpy, signal, sys
from rlhfuse.monitor.watchdog import Watchdog

told = Watchdog.progress

def progress(self, doing):
    told(self, doing)
    if os.environ["RANK"] == "1" and doing.startswith("training instruction") and doing.endswith("actor:1B1"):
        os.kill(os.getpid(), signal.SIGKILL)

Watchdog.progress = progress
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_rank_killed_in_training_leaves_the_others_instructions_in_the_report(config, tmp_path):
    """Rank 1 dies in the actor's second backward; rank 0 waits for something of it, by name."""
    (tmp_path / "killer.py").write_text(KILLER)
    job = launch(config, f"trainer.output_dir={tmp_path / 'run'}", under=tmp_path / "killer.py")
    out = finish(job)
    assert job.returncode != 0
    line = next((line for line in out.splitlines() if line.startswith("watchdog: ")), out)
    instruction = r"training instruction \d+: (\S+)(?: waits for (.+))?"
    dead = r"watchdog: rank 1 \(pid \d+ on \S+\) died; last seen in: .*"
    found = re.fullmatch(f"{dead}; this is rank 0, which was in: {instruction}", line)
    assert found, out
    assert found[1].endswith(">1") or "<1" in (found[2] or "") or found[1].endswith("ST"), out  # its peer
    assert "  rank 1 (pid" in out and not ranks_of(job.pid)


def ranks_of(session: int) -> dict[int, int]:
    """RANK -> pid of the job's processes, found by their environment and session."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            alive = folder.name.isdigit() and os.getsid(int(folder.name))
            if alive and b"train_ppo.py" in (folder / "cmdline").read_bytes():
                variables = dict(v.split(b"=", 1) for v in (folder / "environ").read_bytes().split(b"\0") if b"=" in v)
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if b"RANK" in variables and parent == session:
                    found[int(variables[b"RANK"])] = int(folder.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def pid_of_rank(rank: int, session: int) -> int:
    return ranks_of(session)[rank]
