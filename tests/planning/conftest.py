"""Searches of plans take moves: what they find goes by no clock."""

import pytest

from rlhfuse.planning.training import schedule_family
from rlhfuse.schedule.search.search import SearchSettings

MOVES_OF_A_SECOND = 250_000  # as many as a slow machine makes


@pytest.fixture(autouse=True, scope="package")
def searches_of_moves():
    def settings(time_limit: float, **more) -> SearchSettings:
        return SearchSettings(iterations=round(time_limit * MOVES_OF_A_SECOND), **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_family, "SearchSettings", settings)
        yield
