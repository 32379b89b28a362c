"""Training of a pair: fused, time-shared and serial schedules give the same bits, and the right gradients."""

from __future__ import annotations

import hashlib

import pytest
import torch
from tiny import write_checkpoint

from rlhfuse.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, RunConfig
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.schedule.builders import greedy, gpipe, serial_1f1b
from rlhfuse.schedule.lowering import lower
from rlhfuse.schedule.problem import StageCosts, fused_problem
from rlhfuse.schedule.ranks import rank_map
from rlhfuse.spec import ModelSpec, ParallelLayout

BUILDERS = {"fused": greedy, "gpipe": gpipe, "serial": serial_1f1b}
LAYOUTS = [("d1t1p4", "d2t1p2"), ("d2t1p2", "d1t1p4"), ("d4t1p1", "d2t1p2"), ("d1t2p2", "d2t1p2"), ("d1t1p4", "d1t2p2")]


def make_batch(seed: int, samples: int = 20) -> RolloutBatch:
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for i in range(samples):
        prompt = torch.randint(3, 200, (int(torch.randint(2, 9, (1,), generator=generator)),), generator=generator)
        length = int(torch.randint(1, 30, (1,), generator=generator))
        response = torch.randint(3, 200, (length,), generator=generator)
        noise = torch.randn(3, length, generator=generator)
        rollouts.append(
            Rollout(i, tuple(prompt.tolist()), tuple(response.tolist()), -5 + 0.1 * noise[0], "stop", -5 + 0.1 * noise[1],
                    noise[2], 0.5)  # fmt: skip
        )
    batch = RolloutBatch.from_rollouts(rollouts)
    count = batch.response_tokens
    return batch.with_fields(
        advantages=torch.randn(count, generator=generator), returns=torch.randn(count, generator=generator)
    )


def make_config(actor: str, critic: str) -> RunConfig:
    config = RunConfig(parallel=ParallelConfig(actor, critic, "d4t1p1", "d4t1p1", "d4t1p1", "d4t1p1", "d4t1p1"))
    config.actor.optim = OptimizerConfig(lr=1e-3, clip_grad=1.0)
    config.critic.optim = OptimizerConfig(lr=2e-3, clip_grad=1.0)
    return config


def microbatches(ranks, actor_count: int) -> dict[str, int]:
    actor, critic = ranks.shape.shares
    return {"actor": actor_count, "critic": actor.pipelines * actor_count // critic.pipelines}


def train(rank: int, folders: dict, actor: str, critic: str, kind: str, steps: int) -> dict:
    """Build the pair on this rank, run `steps` mini-batches, return digests, gradients and statistics."""
    from rlhfuse.fusion.training_step import PairStep
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.roles import Checkpoints, build_roles

    device = choose_device("cpu", 0, 1)
    config = make_config(actor, critic)
    layouts = {"actor": ParallelLayout.parse(actor), "critic": ParallelLayout.parse(critic)}
    ranks = rank_map(layouts)
    specs = {role: ModelSpec.from_config(path) for role, path in folders.items()}
    roles = build_roles(config, Checkpoints(folders, specs), ranks, rank, device)
    counts = microbatches(ranks, 4)
    costs = {role: StageCosts((1,) * layout.pp, (2,) * layout.pp, (1,) * layout.pp)
             for role, layout in layouts.items()}  # fmt: skip
    problem = fused_problem(layouts, 4, costs)
    program = lower(BUILDERS[kind](problem), ranks)[rank]
    models = {"actor": roles.actor, "critic": roles.critic}
    step = PairStep(
        rank, ranks, program, models, roles.channels, AlgorithmConfig(), 1.0, device.torch_device, lambda _: None
    )
    out: dict = {"stats": [], "gradients": {}, "norms": []}
    for number in range(steps):
        captured: dict[str, torch.Tensor] = {}
        for role, model in models.items():
            original = model.optimizer.step

            def spy(lr, model=model, role=role, original=original):
                for name, parameter in model.optimizer.module.module.named_parameters():
                    captured[f"{role}.{name}"] = parameter.main_grad.clone()
                return original(lr)

            model.optimizer.step = spy
        result = step.run(make_batch(number), counts, {"actor": 1e-3, "critic": 2e-3})
        for model in models.values():
            del model.optimizer.step
        out["stats"].append({r: {k: float(v) for k, v in s.items()} for r, s in result.stats.items()})
        out["norms"].append({role: s.grad_norm for role, s in result.steps.items()})
        if number == 0:
            out["gradients"] = captured
    sha = hashlib.sha256()
    for model in models.values():
        for parameter in model.optimizer.module.parameters():
            sha.update(parameter.detach().numpy().tobytes())
    out["digest"] = sha.hexdigest()
    named = dict(roles.actor.optimizer.module.module.named_parameters())
    out["vocabulary weights"] = [
        named[name].detach().clone()
        for name in ("embedding.word_embeddings.weight", "output_layer.weight")
        if name in named
    ]
    roles.groups.close()
    out["peak_live"] = {role: model.stage.peak_live for role, model in models.items()}
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
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    actor, critic = write_checkpoint(base / "actor", seed=1), write_checkpoint(base / "critic", scalar_head=True, seed=2)
    return {"actor": actor, "reference": actor, "critic": critic, "reward": critic}


@pytest.fixture(scope="module")
def reference(workers, folders):
    return workers.run(reference_losses, folders)[0]


@pytest.mark.parametrize("actor,critic", LAYOUTS)
def test_every_schedule_gives_the_same_bits_and_the_reference_gradients(workers, folders, reference, actor, critic):
    runs = {kind: workers.run(train, folders, actor, critic, kind, 2) for kind in BUILDERS}
    for rank in range(4):
        assert len({runs[kind][rank]["digest"] for kind in BUILDERS}) == 1
        assert runs["fused"][rank]["stats"] == runs["serial"][rank]["stats"]
        assert runs["fused"][rank]["norms"] == runs["serial"][rank]["norms"]
    for role in ("actor", "critic"):
        norm, loss = reference[role]
        assert runs["fused"][0]["norms"][0][role] == pytest.approx(norm, rel=2e-5)
        name = {"actor": "pg_loss", "critic": "vf_loss"}[role]
        total = sum(r["stats"][0].get(role, {}).get(name, 0.0) for r in runs["fused"])
        assert total == pytest.approx(loss, rel=2e-5)


def test_gradient_of_the_first_stage_equals_the_reference_element_by_element(workers, folders, reference):
    run = workers.run(train, folders, "d1t1p4", "d2t1p2", "fused", 1)
    got = run[0]["gradients"]["actor.embedding.word_embeddings.weight"][:200]
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
