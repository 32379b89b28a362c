"""Where no layouts have room, the refusal says how many ranks would have, or that none would."""

from dataclasses import replace

import pytest
from layout_search.enough_ranks import with_enough_ranks
from testkit.four_ranks import SPECS
from testkit.search_cases import everything

from rlhfuse.base.errors import InputError
from rlhfuse.planning.job import Job
from rlhfuse.planning.settle import settle, settle_but_layouts


def test_the_number_of_ranks_that_is_named_has_room():
    for limit, width, layers, named in ((40.0, 8192, 8, "use "), (3.5, 8192, 8, "no"), (3.5, 16384, 64, "no")):
        large = {n: replace(spec, hidden=width, mlp=32768, layers=layers, head_dim=1024) for n, spec in SPECS.items()}
        config = everything(trainer__hardware="a100", trainer__memory_limit_gb=limit)
        job = Job(config, large, 1)
        with pytest.raises(InputError) as caught:
            settle(job)
        why, _, words = with_enough_ranks(str(caught.value), settle_but_layouts(job)).rpartition("; ")
        assert words.startswith(named) and "offload_optimizer" not in why  # no remedy of one table alone
        if named == "use ":
            assert settle(Job(config, large, int(words.split()[1]))).lines
