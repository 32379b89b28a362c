"""Training of a pair: fused, time-shared and serial schedules give the same bits, and the right gradients."""

from __future__ import annotations

import pytest
import torch
from testkit.tiny import write_checkpoint
from testkit.training_pair import build_pair, make_batch

from rlhfuse.config.settings import AlgorithmConfig
from rlhfuse.schedule.ir.evaluate import evaluate

KINDS = ("fused", "eager", "serial")
LAYOUTS = [("d1t1p4", "d2t1p2"), ("d2t1p2", "d1t1p4"), ("d4t1p1", "d2t1p2"), ("d1t2p2", "d2t1p2"), ("d1t1p4", "d1t2p2")]


def train(rank: int, folders: dict, actor: str, critic: str, kind: str, steps: int, optimizer: str = "adam") -> dict:
    """Build the pair on this rank, run `steps` mini-batches, return digests, gradients and statistics."""
    pair = build_pair(rank, folders, actor, critic, kind, optimizer=optimizer)
    out: dict = {"stats": [], "gradients": {}, "norms": [], "losses": [], "peak": []}
    for number in range(steps):
        captured: dict[str, torch.Tensor] = {}
        for role, model in pair.models.items():
            original = model.optimizer.step

            def spy(lr, model=model, role=role, original=original):
                for stage, module in model.optimizer.modules.items():
                    for name, parameter in module.module.named_parameters():
                        captured[f"{role}.{stage}.{name}"] = parameter.main_grad.clone()
                return original(lr)

            model.optimizer.step = spy
        result = pair.train(number)
        for model in pair.models.values():
            del model.optimizer.step
        out["stats"].append({r: {k: float(v) for k, v in s.items()} for r, s in result.stats.items()})
        out["norms"].append({role: s.grad_norm for role, s in result.steps.items()})
        out["losses"].append({str(action): loss for action, loss in result.report.losses.items()})
        out["peak"].append(result.report.peak_live)
        if number == 0:
            out["gradients"] = captured
    out["digest"] = pair.digest()
    named = {k: v for m in pair.models["actor"].optimizer.modules.values() for k, v in m.module.named_parameters()}
    out["vocabulary weights"] = [
        named[name].detach().clone()
        for name in ("embedding.word_embeddings.weight", "output_layer.weight")
        if name in named
    ]
    pair.close()
    out["node"], out["predicted peak"] = pair.ranks.node_of(rank), evaluate(pair.schedule).node_peak_memory
    return out


def reference_losses(rank: int, folders: dict) -> dict:
    """One process, whole models, whole mini-batch at once: gradient norms and loss sums."""
    if rank:
        return {}
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from rlhfuse.ppo.losses import policy_loss_sum, value_loss_sum

    batch, algorithm = make_batch(0), AlgorithmConfig()
    tokens, borders = batch.tokens.tolist(), batch.cu_seqlens.tolist()
    rows = [torch.tensor([tokens[a:b]]) for a, b in zip(borders, borders[1:])]
    actor = AutoModelForCausalLM.from_pretrained(folders["actor"], dtype=torch.float32)
    logits = torch.cat([actor(row).logits[0] for row in rows])[batch.prediction_index]
    logprobs = logits.log_softmax(-1).gather(1, batch.tokens[batch.response_index][:, None])[:, 0]
    loss, _ = policy_loss_sum(logprobs, batch.old_logprobs, batch.advantages, algorithm.clip_eps)
    (loss / batch.response_tokens).backward()
    critic = AutoModelForSequenceClassification.from_pretrained(folders["critic"], dtype=torch.float32)
    hidden = torch.cat([critic.model(row).last_hidden_state[0] for row in rows])
    values = critic.score(hidden)[:, 0][batch.prediction_index]
    value_loss, _ = value_loss_sum(values, batch.values, batch.returns, algorithm.value_clip_eps)
    (value_loss / batch.response_tokens).backward()

    def norm(model):
        return float(torch.stack([p.grad.double().pow(2).sum() for p in model.parameters()]).sum().sqrt())

    return {
        "actor": (norm(actor), loss.item()),
        "critic": (norm(critic), value_loss.item()),
        "embedding": actor.model.embed_tokens.weight.grad.clone(),
    }


@pytest.fixture(scope="module")
def reference(workers, folders):
    return workers.run(reference_losses, folders)[0]


@pytest.mark.parametrize("actor,critic", LAYOUTS)
def test_every_schedule_gives_the_same_bits_and_the_reference_gradients(workers, folders, reference, actor, critic):
    runs = {kind: workers.run(train, folders, actor, critic, kind, 2) for kind in KINDS}
    for rank in range(4):
        assert len({runs[kind][rank]["digest"] for kind in KINDS}) == 1
        assert runs["fused"][rank]["stats"] == runs["serial"][rank]["stats"]
        assert runs["fused"][rank]["losses"] == runs["serial"][rank]["losses"] == runs["eager"][rank]["losses"]
        for run in runs.values():  # live micro-batches, counted while it ran, are those of the schedule
            assert set(run[rank]["peak"]) == {run[rank]["predicted peak"][run[rank]["node"]]}
        assert runs["fused"][rank]["norms"] == runs["serial"][rank]["norms"]
    for role in ("actor", "critic"):
        norm, loss = reference[role]
        assert runs["fused"][0]["norms"][0][role] == pytest.approx(norm, rel=2e-5)
        name = {"actor": "pg_loss", "critic": "vf_loss"}[role]
        total = sum(r["stats"][0].get(role, {}).get(name, 0.0) for r in runs["fused"])
        assert total == pytest.approx(loss, rel=2e-5)


def test_gradient_of_the_first_stage_equals_the_reference_element_by_element(workers, folders, reference):
    run = workers.run(train, folders, "d1t1p4", "d2t1p2", "fused", 1)
    got = run[0]["gradients"]["actor.0.embedding.word_embeddings.weight"][:200]
    want = reference["embedding"]
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("actor", ["d1t1p4", "d1t2p2", "d2t1p2"])
def test_tied_embeddings_stay_tied_over_stages_and_get_both_gradients(workers, folders, tmp_path, actor):
    tied = write_checkpoint(tmp_path / "tied", seed=5, tie_word_embeddings=True, num_hidden_layers=5)
    models = folders | {"actor": tied, "reference": tied}
    norm, loss = workers.run(reference_losses, models)[0]["actor"]
    run = workers.run(train, models, actor, "d2t1p2", "fused", 2)
    assert run[0]["norms"][0]["actor"] == pytest.approx(norm, rel=2e-5)
    assert sum(r["stats"][0].get("actor", {}).get("pg_loss", 0.0) for r in run) == pytest.approx(loss, rel=2e-5)
    pieces = {rank: r["vocabulary weights"] for rank, r in enumerate(run)}
    if actor == "d1t2p2":  # stage 0 on ranks 0, 1 and stage 1 on ranks 2, 3: each holds half of the vocabulary
        assert torch.equal(pieces[0][0], pieces[2][0]) and torch.equal(pieces[1][0], pieces[3][0])
    else:
        first, last = (0, 3) if actor == "d1t1p4" else (0, 1)
        assert torch.equal(pieces[first][0], pieces[last][0])
