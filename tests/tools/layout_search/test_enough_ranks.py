"""Where no layouts have room, the refusal says how many ranks would have, or that none would."""

from dataclasses import replace

import pytest
from layout_search.enough_ranks import with_enough_ranks
from testkit.four_ranks import SPECS
from testkit.search_cases import everything

from rlhfuse.base.errors import InputError
from rlhfuse.planning.settle import Facts, settle, settle_but_layouts

LARGE = {role: replace(spec, hidden=8192, mlp=32768, layers=8, head_dim=1024) for role, spec in SPECS.items()}


def refusal(ranks: int, **keys) -> str:
    facts, config = Facts(LARGE, ranks), everything(trainer__hardware="a100", **keys)
    with pytest.raises(InputError) as caught:
        settle(config, facts)
    return with_enough_ranks(str(caught.value), settle_but_layouts(config, facts))


def test_the_number_of_ranks_that_is_named_has_room():
    words = refusal(1, trainer__memory_limit_gb=40.0)
    ranks = int(words.partition("; use ")[2].split()[0])
    assert 1 < ranks <= 64
    config = everything(trainer__hardware="a100", trainer__memory_limit_gb=40.0)
    assert settle(config, Facts(LARGE, ranks)).lines
    assert "no number of ranks up to 64 would do" in refusal(1, trainer__memory_limit_gb=3.5)
