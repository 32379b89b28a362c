"""Checkpoints that several tests of fusion/ train."""

import pytest
from testkit.tiny import write_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    actor = write_checkpoint(base / "actor", seed=1)
    critic = write_checkpoint(base / "critic", scalar_head=True, seed=2)
    return {"actor": actor, "reference": actor, "critic": critic, "reward": critic}
