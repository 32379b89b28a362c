"""A run that several tools are asked about."""

import pytest
from testkit.finished_run import write_config


@pytest.fixture
def run_yaml(tmp_path) -> str:
    return str(write_config(tmp_path / "run.yaml", "search_seconds: 0.2"))
