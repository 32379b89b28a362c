"""How tools/rehearse.py ends: 2 over the limit, 1 where NCCL would refuse or the code fails; and its own processes."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from testkit.paths import ROOT
from testkit.programs import call_tool, finish

from tools import rehearse as tool

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the shim is compiled by g++")
SMALL = dict(
    model_type="llama",
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1024,
    max_position_embeddings=512,
    num_hidden_layers=2,
)
RUN = """
actor: {{path: {folder}}}
reward: {{path: {folder}}}
data: {{train_files: [none.jsonl], max_prompt_tokens: 64}}
rollout: {{prompts_per_iteration: 16, samples_per_prompt: 1, max_response_tokens: 64}}
algorithm: {{minibatches: 2}}
fusion: {{actor_microbatches: 2, intra_stage: false}}
parallel: {{actor_train: d1t2p2, critic_train: d1t2p2, generation: d2t2p1, inference: d2t2p1}}
trainer: {{dtype: bfloat16, device: cuda, hardware: h100}}
"""
FAULTS = {  # file, what is there, what a fault would be, what a rehearsal says
    "device": (
        "rlhfuse/models/stage.py",
        "tokens = batch.tokens[None]",
        "tokens = batch.tokens[None].cpu()",
        "device",
    ),
    "shape": (
        "rlhfuse/models/stage.py",
        "return rows // self.shards, 1, self._hidden",
        "return rows // self.shards, 1, self._hidden // 2",
        "over [256]",
    ),
    "dtype": (
        "rlhfuse/models/stage.py",
        "        out = out[0]  # Megatron returns [1, T, 1 or H]",
        "        out = out[0].float()",
        "torch.float32",
    ),
    "contiguity": (
        "rlhfuse/fusion/intra/p2p.py",
        "tensor = tensor.contiguous()",
        "tensor = tensor.transpose(0, 2)",
        "not contiguous",
    ),
}


@pytest.fixture(scope="module")
def run_yaml(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    (folder / "config.json").write_text(json.dumps(SMALL))
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    return folder / "run.yaml"


def found(peak: int, problems: dict[str, int]) -> dict:
    """A rank's rehearsal of one phase."""
    phase = dict(phase="training", iteration=0, peak=peak, host=0, reserved=0, host_peak=0, table=[], reads={})
    return dict(rank=0, phases=[phase], problems=problems, moved=0)


@pytest.mark.parametrize(
    "peak, problems, code, said",
    [
        (10**9, {}, 0, "training"),
        (81 * 10**9, {}, 2, "rank 0: training takes 81.0 GB, a rank has 77.4 GB beside its process"),
        (10**9, {"refused by NCCL: a tensor on the CPU": 3}, 1, "3 times: refused by NCCL: a tensor on the CPU"),
        (81 * 10**9, {"all_reduce of a tensor on the CPU": 3}, 2, "over the limit"),
    ],
)
def test_exits_with_2_over_the_limit_and_with_1_for_what_nccl_refuses(
    run_yaml, monkeypatch, peak, problems, code, said
):
    monkeypatch.setattr(tool, "rehearse", lambda *_: found(peak, problems))
    done = call_tool("rehearse", "--config", run_yaml, "--world-size", 4, "--rank", 0)
    assert done.returncode == code and said in done.stdout


def test_a_run_that_cannot_fit_is_refused_before_it_is_rehearsed(run_yaml):
    done = call_tool("rehearse", "--config", run_yaml, "--world-size", 4, "trainer.memory_limit_gb=0.01")
    assert done.returncode == 2 and "but a rank of this h100 has" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_one_rank_of_each_combination_of_stages_is_rehearsed(programs, run_yaml):
    done = programs.tool("rehearse", "--config", run_yaml, "--world-size", 4, "--stages", "--phase", "moves")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rehearsing rank 0, 2 of 4" in done.stdout
    assert "memory of rank 0" in done.stdout and "memory of rank 2" in done.stdout


def test_two_processes_compile_the_shim_at_once(programs, tmp_path):
    code = "from rlhfuse.rehearsal.shim import load_shim; load_shim(); import torch"
    both = [programs.start(sys.executable, "-c", code, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    for process in both:
        finish(process)
    (library,) = tmp_path.iterdir()
    assert library.suffix == ".so"


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_planted_into_the_code_is_found(programs, run_yaml, tmp_path, kind):
    file, right, wrong, said = FAULTS[kind]
    for folder in ("rlhfuse", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    text = (tmp_path / file).read_text()
    assert text.count(right) == 1
    (tmp_path / file).write_text(text.replace(right, wrong))
    words = ("--config", run_yaml, "--world-size", 4, "--rank", 2, "--phase", "training")
    done = programs.python(tmp_path / "tools/rehearse.py", *words, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and said in done.stdout + done.stderr, (done.stdout + done.stderr)[-2000:]
