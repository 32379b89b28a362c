"""The CostModel of a running job: straight lines through what it measured.

Each kind of work is linear in a few counts, with coefficients that cannot be negative:

    decode step = a + b x batch + c x context tokens        prefill, scoring = a + b x tokens + c x sequences
    migration   = a + b x bytes                             swap-in, meeting, release = their medians

Decoding, prefill and scoring have one line for each neighbour that they were observed beside (lines.py).

Knows nothing of models or layouts. Paper section 4.2 (the threshold is refined while training runs).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlhfuse.costs.analytic import NEIGHBOURS, check_neighbour
from rlhfuse.costs.lines import Line, LineTable
from rlhfuse.errors import InputError
from rlhfuse.files import write_text

COLUMNS = {"decode": ("batch", "context tokens"), "prefill": ("tokens", "sequences"), "score": ("tokens", "sequences")}
MEDIANS = ("swap_in", "meeting", "release")


@dataclass(frozen=True)
class DecodeObservation:
    """One decode step: sequences, tokens of context over all of them, seconds, and what the others did."""

    batch: int
    context_tokens: int
    seconds: float
    neighbour: str = "idle"  # one of cost.NEIGHBOURS


@dataclass(frozen=True)
class TokensObservation:
    """One packed forward (a prefill, or the scoring by all models): tokens, sequences, seconds, the others."""

    tokens: int
    sequences: int
    seconds: float
    neighbour: str = "idle"


@dataclass(frozen=True)
class BytesObservation:
    """One transfer of keys and values."""

    kv_bytes: int
    seconds: float


@dataclass(frozen=True)
class MeasuredCost:
    """A CostModel of one generation instance, fitted to observations; prints and saves as JSON.

    It answers for `neighbour`; `beside` gives the same tables answering for another one.
    """

    decode: LineTable  # of batch, context tokens
    prefill: LineTable  # of tokens, sequences
    score: LineTable  # of tokens, sequences; all models that score
    migration: Line  # of bytes
    swap_in: float  # seconds
    meeting: float = 0.0
    release: float = 0.0
    neighbour: str = "idle"

    @staticmethod
    def fit(
        decode: Sequence[DecodeObservation],
        prefill: Sequence[TokensObservation],
        score: Sequence[TokensObservation],
        migration: Sequence[BytesObservation],
        swap_in: Sequence[float],
        meeting: Sequence[float] = (0.0,),
        release: Sequence[float] = (0.0,),
    ) -> MeasuredCost:
        """Fit every line. Raises InputError naming the kind without observations or with a bad number.

        A job that never migrated measures one transfer and one swap-in at start (as profiling does) or keeps the lines
        of its previous fit: nothing is guessed here. Who measured single steps alone has no meetings and no releases.
        """
        kinds = {
            "decode": decode,
            "prefill": prefill,
            "score": score,
            "migration": migration,
            "swap_in": swap_in,
            "meeting": meeting,
            "release": release,
        }
        for kind, seen in kinds.items():
            if not len(seen):
                raise InputError(f"no {kind} observation to fit costs from; measure at least one")
            for one in seen:
                seconds = one if kind in MEDIANS else one.seconds
                if not (np.isfinite(seconds) and seconds >= 0):
                    raise InputError(f"{kind} observation {one}: seconds must be finite and >= 0")
                if kind in COLUMNS and one.neighbour not in NEIGHBOURS:  # of thousands: no words for the good ones
                    check_neighbour(one.neighbour, f"{kind} observation {one}")
        return MeasuredCost(
            decode=LineTable.fit([((o.batch, o.context_tokens), o.seconds, o.neighbour) for o in decode]),
            prefill=LineTable.fit([((o.tokens, o.sequences), o.seconds, o.neighbour) for o in prefill]),
            score=LineTable.fit([((o.tokens, o.sequences), o.seconds, o.neighbour) for o in score]),
            migration=Line.fit([(o.kv_bytes,) for o in migration], [o.seconds for o in migration]),
            **{kind: float(np.median(np.asarray(kinds[kind]))) for kind in MEDIANS},
        )

    def prefill_seconds(self, tokens: float, sequences: float) -> float:
        return self.prefill.beside(self.neighbour)(tokens, sequences) if tokens > 0 else 0.0

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        return self.decode.beside(self.neighbour)(batch, context_tokens)

    def score_seconds(self, tokens: float, sequences: float) -> float:
        return self.score.beside(self.neighbour)(tokens, sequences) if tokens > 0 else 0.0

    def swap_in_seconds(self) -> float:
        return self.swap_in

    def migration_seconds(self, kv_bytes: float) -> float:
        return self.migration(kv_bytes) if kv_bytes > 0 else 0.0

    def meeting_seconds(self) -> float:
        return self.meeting

    def release_seconds(self) -> float:
        return self.release

    def beside(self, neighbour: str) -> MeasuredCost:
        return replace(self, neighbour=check_neighbour(neighbour))

    def __str__(self) -> str:
        rows = [line for kind, names in COLUMNS.items() for line in getattr(self, kind).describe(kind, names)]
        move = f"{self.migration.constant * 1e6:.1f} us + {self.migration.slopes[0] * 1e6:.6f} us x bytes"
        medians = (f"{kind.replace('_', '-'):10s} {getattr(self, kind) * 1e6:.1f} us" for kind in MEDIANS)
        return "\n".join((*rows, f"migration  {move}", *medians))

    def to_dict(self) -> dict:
        return {
            "version": 3,
            **{kind: getattr(self, kind).to_dict() for kind in COLUMNS},
            "migration": self.migration.to_dict(),
            **{kind: getattr(self, kind) for kind in MEDIANS},
        }

    @staticmethod
    def from_dict(raw: dict, where: str = "measured costs") -> MeasuredCost:
        """Inverse of `to_dict`; in version 1 one line stands for every neighbour, before 3 meetings took no time.

        Raises InputError naming `where` and the field.
        """
        try:
            if raw["version"] not in (1, 2, 3):
                raise InputError(f"{where}: version is {raw['version']!r}; only 1, 2 and 3 are known")
            read = LineTable.from_line if raw["version"] == 1 else LineTable.from_dict
            tables = {kind: read(raw[kind], 2, f"{where}: {kind}") for kind in COLUMNS}
            migration = Line.from_dict(raw["migration"], 1, f"{where}: migration")
            medians = MEDIANS if raw["version"] == 3 else MEDIANS[:1]
            return MeasuredCost(**tables, migration=migration, **{kind: float(raw[kind]) for kind in medians})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            known = ", ".join((*COLUMNS, "migration", *MEDIANS))
            raise InputError(f"{where}: {error} is missing or no number; needed are version, {known}") from None


def load_measured_cost(path: str | Path) -> MeasuredCost:
    """Read what `save_measured_cost` wrote. Raises InputError naming the file."""
    return MeasuredCost.from_dict(read_cost_file(path), str(path))


def read_cost_file(path: str | Path) -> dict:
    """The JSON object in a cost file. Raises InputError naming the file."""
    try:
        raw = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise InputError(f"cost file {path} does not exist") from None
    except OSError as error:
        raise InputError(f"cost file {path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"cost file {path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"cost file {path} holds no JSON object; give costs.json of a run or a profile")
    return raw


def save_measured_cost(costs: MeasuredCost, path: str | Path) -> None:
    """Write beside and rename. Raises InputError where that fails."""
    write_text(path, json.dumps(costs.to_dict(), indent=1) + "\n")
