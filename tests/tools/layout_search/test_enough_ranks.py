"""Where no layouts have room, the refusal says how many ranks would have, or that none would."""

from dataclasses import replace

import pytest
from layout_search.enough_ranks import with_enough_ranks
from testkit.four_ranks import SPECS
from testkit.search_cases import everything

from rlhfuse.base.errors import InputError
from rlhfuse.planning.settle import Facts, settle, settle_but_layouts

LARGE = {role: replace(spec, hidden=8192, mlp=32768, layers=8, head_dim=1024) for role, spec in SPECS.items()}


def test_the_number_of_ranks_that_is_named_has_room():
    for limit, named in ((40.0, "use "), (3.5, "no number of ranks up to 64 would do")):
        config, facts = everything(trainer__hardware="a100", trainer__memory_limit_gb=limit), Facts(LARGE, 1)
        with pytest.raises(InputError) as caught:
            settle(config, facts)
        words = with_enough_ranks(str(caught.value), settle_but_layouts(config, facts)).rpartition("; ")[2]
        assert words.startswith(named)
        if named == "use ":
            assert settle(config, Facts(LARGE, int(words.split()[1]))).lines
