"""A pair with sequence parallelism and recomputation: schedules and recomputation change no bit over several steps."""

from __future__ import annotations

import pytest
from testkit.tiny import write_checkpoint
from testkit.training_pair import build_pair


def digests(rank: int, folders: dict, actor: str, critic: str, kind: str, sequence_parallel: bool, recompute: str):
    """Weights and optimizer state after two mini-batches, and their gradient norms."""
    pair = build_pair(rank, folders, actor, critic, kind, sequence_parallel=sequence_parallel, recompute=recompute)
    norms = [{role: s.grad_norm for role, s in pair.train(number).steps.items()} for number in range(2)]
    found = pair.digest(), norms
    pair.close()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    actor = write_checkpoint(base / "actor", seed=1, model_type="qwen3", tie_word_embeddings=True, num_hidden_layers=5)
    critic = write_checkpoint(base / "critic", scalar_head=True, seed=2, num_hidden_layers=5)
    return {"actor": actor, "reference": actor, "critic": critic, "reward": critic}


@pytest.mark.parametrize(
    "actor, critic", [("d1t2p2", "d1t1p4"), pytest.param("d2t2p1", "d1t2p2", marks=pytest.mark.slow)]
)
def test_neither_schedule_nor_recomputation_changes_a_bit(workers, folders, actor, critic):
    """In the first pair the critic has no tensor ranks, and two of its stages are merged on a node."""
    plain = workers.run(digests, folders, actor, critic, "serial", True, "none")
    assert plain == workers.run(digests, folders, actor, critic, "fused", True, "full")
    whole = workers.run(digests, folders, actor, critic, "serial", False, "none")
    for (_, cut_norms), (_, whole_norms) in zip(plain, whole):
        for ours, theirs in zip(cut_norms, whole_norms):
            assert ours == pytest.approx(theirs, rel=1e-4)
