"""Programs that no other test starts, as a user starts them: by the file alone, without the path that tests have."""

import sys

from testkit.paths import ROOT
from testkit.programs import finish

MADE = ("examples/make/make_sums.py", "examples/make/make_tiny_models.py", "docs/make/generate_docs.py")
TOOLS = "convert_checkpoint", "show_schedule"


def test_every_program_starts_and_says_what_it_takes(programs):
    files = [ROOT / name for name in MADE] + [ROOT / "tools" / f"{name}.py" for name in TOOLS]
    started = [programs.start(sys.executable, file, "--help", PYTHONPATH="") for file in files]
    for file, process in zip(files, started):
        assert f"usage: {file.name}" in finish(process)
