"""Lines of Python by room beside the budget that CONTRIBUTING.md gives each, and beside another commit.

python -m testkit.line_budget [REF]          REF: default main, where there is one
"""

import re
import subprocess
import sys
from collections import Counter

from rlhfuse.base.errors import InputError
from rlhfuse.tools.program import run_program
from testkit.paths import ROOT

PAGE = ROOT / "CONTRIBUTING.md"


def budget() -> dict[str, int]:
    """Most lines of each room: the rows of the page's table, `rlhfuse/gen` in the form of a folder."""
    rows = re.findall(r"^\| `([\w/]+)/` \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE)
    return {room: int(lines.replace(",", "")) for room, lines in rows}


def room_of(path: str) -> str:
    """A package of rlhfuse, or a folder beside it."""
    parts = path.split("/")
    return "/".join(parts[: 1 + (parts[0] == "rlhfuse" and len(parts) > 2)])


def lines_by_room() -> Counter[str]:
    files = _git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").split()
    counts: Counter[str] = Counter()
    for path in filter(lambda path: (ROOT / path).exists(), files):
        counts[room_of(path)] += len((ROOT / path).read_bytes().splitlines())
    return counts


def growth(ref: str) -> Counter[str]:
    """Lines that each room has more than commit `ref`."""
    grown: Counter[str] = Counter()
    for line in _git("diff", "--numstat", "--no-renames", ref, "--", "*.py").splitlines():
        added, removed, path = line.split("\t")
        grown[room_of(path)] += int(added) - int(removed)
    return grown


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    ref = sys.argv[1] if len(sys.argv) > 1 else "main"
    known = subprocess.run(["git", "rev-parse", "-q", "--verify", ref], cwd=ROOT, capture_output=True).returncode == 0
    counts, grown, most = lines_by_room(), growth(ref) if known else Counter(), budget()
    counts["rlhfuse"] += sum(lines for room, lines in counts.items() if room.startswith("rlhfuse/"))
    grown["rlhfuse"] += sum(lines for room, lines in grown.items() if room.startswith("rlhfuse/"))
    for room, limit in most.items():
        print(
            f"{room:22} {counts[room]:6,} of {limit:6,} lines {grown[room]:+6,}" + ("" if known else " (no main here)")
        )
    if over := [
        f"{room} has {counts[room]} lines, {limit} are its budget"
        for room, limit in most.items()
        if counts[room] > limit
    ]:
        raise InputError(f"{'; '.join(over)}: take lines out, or say in CONTRIBUTING.md what the new ones are for")
    return 0


if __name__ == "__main__":
    run_program(main)
