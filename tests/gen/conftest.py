"""Engines and prompts that the tests of gen/ share."""

from __future__ import annotations

import pytest
import torch
from testkit.gen_models import random_weights, tiny_spec

from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.engine import Engine, EngineOptions


@pytest.fixture(autouse=True)
def one_thread():
    """Exactness is promised for one thread; and two, on a busy machine, wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def spec() -> ModelSpec:
    return tiny_spec()


@pytest.fixture
def make_engine(spec):
    """make_engine(num_blocks=.., block_tokens=.., ...) -> Engine over the same weights each time."""
    weights = random_weights(spec)

    def make(**options) -> Engine:
        return Engine(spec, weights, EngineOptions(**({"num_blocks": 200} | options)))

    return make


@pytest.fixture
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(8, 301, (n,), generator=generator).tolist() for n in (1, 5, 16, 17, 33, 60, 16, 90)]
