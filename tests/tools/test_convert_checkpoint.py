"""tools/convert_checkpoint.py: checkpoints become folders that transformers loads, with equal logits."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from testkit.programs import call_tool
from testkit.tiny import write_checkpoint, write_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.hf import load_weights
from rlhfuse.parallel.fragments import Fragment, Place
from rlhfuse.run.checkpoint.checkpoint import Manifest, RunState
from rlhfuse.run.checkpoint.compatibility import RunCompatibility
from rlhfuse.run.checkpoint.shard_files import write_rank_file


def fragments(path: Path, head: bool) -> list[Fragment]:
    """What the one rank of a layout without cuts has of a Hugging Face folder."""
    weights = load_weights(path, ModelSpec.from_config(path), scalar_head=head)
    return [Fragment(name, Place.whole(w.shape), 0, {"main": w.flatten()}) for name, w in weights.items()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with one checkpoint, and the folders that its models came from."""
    base = tmp_path_factory.mktemp("run")
    actor = write_tokenizer(write_checkpoint(base / "actor", seed=1, tie_word_embeddings=True, model_type="qwen2"))
    critic = write_checkpoint(base / "critic", scalar_head=True, seed=2)
    folder = base / "run" / "checkpoints" / "iteration-3"
    folder.mkdir(parents=True)
    file = write_rank_file(folder, 0, {"actor": fragments(actor, False), "critic": fragments(critic, True)})
    models = {role: asdict(ModelSpec.from_config(path)) for role, path in (("actor", actor), ("critic", critic))}
    settings = {"trainer.dtype": "float32", "actor.path": str(actor), "critic.path": str(critic)}
    facts = RunCompatibility(**json.loads(json.dumps(asdict(RunCompatibility(1, {}, models, "", settings)))))
    state = RunState({}, {}, {"metrics_bytes": 0})
    (folder / "manifest.json").write_text(Manifest(3, facts, state, (file,)).to_text())
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
