"""tools/convert_checkpoint.py: shards of any layout become folders that transformers loads, with equal logits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from testkit.programs import call_tool
from testkit.tiny import write_checkpoint, write_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhfuse.checkpoint.checkpoint import Manifest, RunState
from rlhfuse.checkpoint.compatibility import RunCompatibility
from rlhfuse.checkpoint.shard_files import write_rank_file
from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.decisions.shards import model_shards
from rlhfuse.models.hf import load_weights
from rlhfuse.parallel.fragments import Fragment, Place

COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def fragments(path: Path, rank: int, head: bool) -> list[Fragment]:
    """What tensor rank `rank` of two has of a Hugging Face folder."""
    spec = ModelSpec.from_config(path)
    weights = load_weights(path, spec, tp_rank=rank, tp_size=2, scalar_head=head)
    shards = {s.tensor: s for s in model_shards(spec, ParallelLayout(1, 2, 1), (((0, 1),),), 4, head) if s.rank == rank}
    found = []
    for name, weight in weights.items():
        dim = int(name.endswith(COLUMNS))
        segments = shards[name].segments
        cut = "layernorm" not in name and not (head and name == "output_layer.weight")
        shape = list(weight.shape)
        shape[dim] *= 2 if cut else 1
        place = Place(tuple(shape), dim, segments, 0, weight.numel())
        found.append(Fragment(name, place, 0, {"main": weight.flatten().contiguous()}))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with one checkpoint of two ranks, and the folders that its models came from."""
    base = tmp_path_factory.mktemp("run")
    actor = write_tokenizer(write_checkpoint(base / "actor", seed=1, tie_word_embeddings=True, model_type="qwen2"))
    critic = write_checkpoint(base / "critic", scalar_head=True, seed=2)
    folder = base / "run" / "checkpoints" / "iteration-3"
    folder.mkdir(parents=True)
    files = tuple(
        write_rank_file(folder, rank, {"actor": fragments(actor, rank, False), "critic": fragments(critic, rank, True)})
        for rank in range(2)
    )
    models = {role: asdict(ModelSpec.from_config(path)) for role, path in (("actor", actor), ("critic", critic))}
    settings = {"trainer.dtype": "float32", "actor.path": str(actor), "critic.path": str(critic)}
    facts = RunCompatibility(**json.loads(json.dumps(asdict(RunCompatibility(2, {}, models, "", settings)))))
    state = RunState({}, {}, {"metrics_bytes": 0})
    (folder / "manifest.json").write_text(Manifest(3, facts, state, files).to_text())
    return base / "run", {"actor": actor, "critic": critic}


def test_both_models_in_shards_have_equal_logits_in_transformers(run, tmp_path):
    run_dir, sources = run
    done = call_tool("convert_checkpoint", run_dir, "--out", tmp_path / "hf", "--shard-gb", 1e-4)
    assert (done.returncode, done.stderr) == (0, "")
    tokens = torch.arange(3, 40)[None]
    kinds = {"actor": AutoModelForCausalLM, "critic": AutoModelForSequenceClassification}
    for role, kind in kinds.items():
        folder = tmp_path / "hf" / role
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) > 2 and files[-1].name.endswith(f"of-{len(files):05}.safetensors")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}
        before, after = (kind.from_pretrained(path, dtype=torch.float32) for path in (sources[role], folder))
        with torch.no_grad():
            torch.testing.assert_close(before(tokens).logits, after(tokens).logits, rtol=0, atol=1e-6)
        weights = before.state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in after.state_dict().items())
    assert (tmp_path / "hf" / "actor" / "tokenizer.json").exists()


def test_bad_input_is_one_line(run, tmp_path):
    run_dir, sources = run
    checkpoint = run_dir / "checkpoints" / "iteration-3"
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    for arguments, words in (
        ((tmp_path, "--out", tmp_path / "hf"), "no checkpoint and no run with checkpoints"),
        ((checkpoint, "--out", tmp_path / "there", "--role", "actor"), "exists already"),
        ((checkpoint, "--out", tmp_path / "hf", "--shard-gb", "0"), "--shard-gb 0.0 must be above 0"),
        ((checkpoint, "--out", tmp_path / "hf", "--like", sources["critic"], "--role", "actor"), "of another shape"),
    ):
        done = call_tool("convert_checkpoint", *arguments)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
