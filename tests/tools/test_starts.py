"""Tools that no other test starts, as a user starts them: by the file alone, without the path that tests have."""

import sys

from testkit.paths import ROOT
from testkit.programs import finish

MADE_AND_TRAINED = ("convert_checkpoint.py", "make_sums.py", "make_tiny_models.py", "train_reward.py")
SHOWN = ("generate_docs.py", "show_forecast.py", "show_schedule.py", "show_timeline.py")


def test_every_tool_starts_and_says_what_it_takes(programs):
    names = (*MADE_AND_TRAINED, *SHOWN)
    started = [programs.start(sys.executable, ROOT / "tools" / name, "--help", PYTHONPATH="") for name in names]
    for name, process in zip(names, started):
        assert f"usage: {name}" in finish(process)
