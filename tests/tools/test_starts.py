"""Tools that no other test starts, as a user starts them: by the file alone, without the path that tests have."""

import sys

from testkit.paths import ROOT
from testkit.programs import finish

MADE_AND_TRAINED = ("convert_checkpoint", "make_sums", "make_tiny_models", "train_reward")
SHOWN = ("generate_docs", "show_forecast", "show_schedule", "show_timeline")


def test_every_tool_starts_and_says_what_it_takes(programs):
    started = {
        name: programs.start(sys.executable, ROOT / "tools" / f"{name}.py", "--help", PYTHONPATH="")
        for name in (*MADE_AND_TRAINED, *SHOWN)
    }
    for name, process in started.items():
        assert f"usage: {name}.py" in finish(process)
