"""What each file of tests took, by tier: recorded in durations.json, and which file comes first."""

import json
from collections import Counter, defaultdict
from pathlib import Path

from testkit.tiers import TIERS

FILE = Path(__file__).with_name("durations.json")
Seconds = dict[str, dict[str, float]]  # file -> tier -> seconds of the tests that this tier adds to the one before


def recorded() -> Seconds:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def within(tier: str) -> tuple[str, ...]:
    """The tiers that a run of this one has."""
    return TIERS[: TIERS.index(tier) + 1]


def seconds_of(file: str, tier: str, table: Seconds) -> float:
    """A file that nobody has timed counts as a minute: it comes early."""
    return sum(table[file].get(one, 0.0) for one in within(tier)) if file in table else 60.0


def record(took: dict[tuple[str, str], float], tier: str, gone: set[str]) -> None:
    """Replace what the tiers of this run took in its files, and forget files that are `gone`."""
    new: dict[str, Counter] = defaultdict(Counter)
    for (file, of), seconds in took.items():
        new[file][of] += seconds
    table = {file: times for file, times in recorded().items() if file not in gone}
    for file, times in new.items():
        kept = {of: seconds for of, seconds in table.get(file, {}).items() if of not in within(tier)}
        table[file] = {of: round(seconds, 1) for of, seconds in {**kept, **times}.items()}
    lines = [f"{json.dumps(file)}: {json.dumps(table[file], sort_keys=True)}" for file in sorted(table)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
