"""Who moves where when the long tail begins: the migration plan, as a value.

With R_t samples of the whole batch unfinished, m of n instances go on decoding and n - m are freed:

    m = ceil(max(R_t / BS_max, R_t x M / C)), at least 1 and at most n - 1      (paper section 4.2)

BS_max is the largest batch that decodes about as fast as one sequence, M the KV bytes of the longest sample, C
an instance's KV bytes. The m instances that hold the most unfinished samples stay; the samples of the others are
dealt to them, largest first, each to the destination with the fewest KV blocks in use that has room. A sample
moves with its keys and values where that is quicker than computing them again, and otherwise as tokens.
Every rank computes the same plan from the same numbers; the simulator and the engine's executor share it.

Knows nothing of tensors, time lines or who executes the plan.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhfuse.errors import InputError

MoveMode = Literal["kv", "tokens"]


@dataclass(frozen=True)
class SequenceState:
    """An unfinished sample as its instance sees it.

    `tokens`: prompt and response so far; `kv_tokens`: those whose keys and values are in the cache, 0 if it waits
    (never started, or preempted); `shared_blocks`: names, on its instance, of full KV blocks that others use too.
    """

    sample_id: int
    instance: int
    tokens: int
    kv_tokens: int
    shared_blocks: tuple[int, ...] = ()

    @property
    def waiting(self) -> bool:
        return self.kv_tokens == 0


@dataclass(frozen=True)
class MoveCost:
    """What decides between the two ways to move: both are straight lines.

    kv: latency + bytes / bandwidth. tokens: the prefill that builds the keys and values again.
    """

    kv_bytes_per_token: float
    transfer_latency_seconds: float
    transfer_seconds_per_byte: float
    prefill_seconds_per_token: float
    prefill_latency_seconds: float = 0.0

    def transfer_seconds(self, tokens: int) -> float:
        """Seconds to send the keys and values of so many tokens; nothing to send takes no time."""
        volume = tokens * self.kv_bytes_per_token
        return self.transfer_latency_seconds + volume * self.transfer_seconds_per_byte if tokens else 0.0

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds to run so many tokens again."""
        return self.prefill_latency_seconds + tokens * self.prefill_seconds_per_token if tokens else 0.0

    def mode(self, sent_tokens: int, run_tokens: int) -> MoveMode:
        """The quicker of sending the cache of `sent_tokens` and running `run_tokens`; equal goes with the cache."""
        return "kv" if self.transfer_seconds(sent_tokens) <= self.prefill_seconds(run_tokens) else "tokens"


class Together:
    """Samples of one instance that move to the same place: what they share is sent, or run again, once."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._sent: set[int] = set()  # shared blocks that travel
        self._present: set[int] = set()  # shared blocks that will be there, sent or run again

    def blocks_there(self, shared_blocks: Iterable[int]) -> int:
        """How many of a further sample's blocks travel with those before it."""
        return len(self._sent.intersection(shared_blocks))

    def mode(self, cost: MoveCost, kv_tokens: int, shared_blocks: Sequence[int]) -> MoveMode:
        """The quicker way for a further sample, given what is sent or run again for those before it.

        A sample that waits has nothing to send: "tokens".
        """
        if not kv_tokens:
            return "tokens"
        sent = kv_tokens - self._block_tokens * self.blocks_there(shared_blocks)
        run = kv_tokens - self._block_tokens * len(self._present.intersection(shared_blocks))
        return cost.mode(sent, run)

    def take(self, mode: MoveMode, shared_blocks: Iterable[int]) -> None:
        """Count a sample in that moves this way."""
        self._present.update(shared_blocks)
        if mode == "kv":
            self._sent.update(shared_blocks)

    def add(self, cost: MoveCost, kv_tokens: int, shared_blocks: Sequence[int]) -> MoveMode:
        """Choose the quicker way for a further sample and count it in."""
        mode = self.mode(cost, kv_tokens, shared_blocks)
        self.take(mode, shared_blocks)
        return mode


_MOVE = re.compile(r"(\d+):(\d+)>(\d+) (kv|tokens) (\d+)")


@dataclass(frozen=True)
class Move:
    """One sample from `source` to `destination`; `kv_tokens` of cache travel (0 in mode "tokens").

    Prints as `sample:source>destination mode kv_tokens`, e.g. `17:3>0 kv 412`.
    """

    sample_id: int
    source: int
    destination: int
    mode: MoveMode
    kv_tokens: int

    def __str__(self) -> str:
        return f"{self.sample_id}:{self.source}>{self.destination} {self.mode} {self.kv_tokens}"

    @staticmethod
    def parse(text: str) -> Move:
        """Inverse of `str`. Raises InputError on anything else."""
        match = _MOVE.fullmatch(text.strip())
        if not match:
            raise InputError(f"move {text!r} is not of the form 17:3>0 kv 412")
        return Move(int(match[1]), int(match[2]), int(match[3]), match[4], int(match[5]))


@dataclass(frozen=True)
class MigrationPlan:
    """The instances that go on decoding, those that are freed, the moves, and the samples that stay."""

    destinations: tuple[int, ...]
    freed: tuple[int, ...]
    moves: tuple[Move, ...]  # ordered by destination, then source, then sample
    stays: tuple[int, ...]  # sample ids

    def moves_from(self, instance: int) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.source == instance)

    def moves_to(self, instance: int) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.destination == instance)

    def __str__(self) -> str:
        def numbers(values: Sequence[int]) -> str:
            return " ".join(map(str, values))

        head = (f"destinations {numbers(self.destinations)}", f"freed {numbers(self.freed)}")
        moves = tuple(f"move {move}" for move in self.moves)
        return "\n".join(line.rstrip() for line in (*head, f"stays {numbers(self.stays)}", *moves))

    @staticmethod
    def parse(text: str) -> MigrationPlan:
        """Inverse of `str`. Raises InputError naming the line."""
        groups: dict[str, tuple[int, ...]] = {}
        moves = []
        for line in text.strip().splitlines():
            word, _, rest = line.partition(" ")
            if word == "move":
                moves.append(Move.parse(rest))
            elif word in ("destinations", "freed", "stays") and all(part.isdigit() for part in rest.split()):
                groups[word] = tuple(map(int, rest.split()))
            else:
                raise InputError(f"migration plan: line {line!r} is not destinations, freed, stays or move")
        if len(groups) != 3:
            raise InputError("migration plan: the lines destinations, freed and stays are all needed")
        return MigrationPlan(groups["destinations"], groups["freed"], tuple(moves), groups["stays"])

    def to_dict(self) -> dict:
        return {
            "destinations": list(self.destinations),
            "freed": list(self.freed),
            "moves": [str(move) for move in self.moves],
            "stays": list(self.stays),
        }

    @staticmethod
    def from_dict(raw: dict) -> MigrationPlan:
        """Inverse of `to_dict`. Raises InputError."""
        try:
            destinations, freed, stays = (tuple(map(int, raw[k])) for k in ("destinations", "freed", "stays"))
            return MigrationPlan(destinations, freed, tuple(Move.parse(text) for text in raw["moves"]), stays)
        except (KeyError, TypeError) as error:
            raise InputError(f"migration plan {json.dumps(raw)[:80]}: {error!r}") from None


def destination_count(
    threshold: int, bs_max: int, sample_kv_bytes: float, capacity_kv_bytes: float, instances: int
) -> int:
    """m: instances that keep decoding when `threshold` samples remain. Raises InputError below two instances.

    `sample_kv_bytes` is M (longest prompt plus maximum output), `capacity_kv_bytes` is C.
    """
    if instances < 2:
        raise InputError(f"{instances} generation instance: none can be freed; inter-stage fusion needs at least 2")
    if bs_max < 1 or capacity_kv_bytes <= 0:
        raise InputError(f"BS_max={bs_max} and C={capacity_kv_bytes} bytes must both be above 0")
    # A hair is taken off before rounding up, so that an exact quotient does not gain an instance by rounding.
    needed = max(threshold / bs_max, threshold * sample_kv_bytes / capacity_kv_bytes)
    return min(max(math.ceil(needed - 1e-9), 1), instances - 1)


@dataclass(frozen=True)
class FusionLimits:
    """What decides m and how samples move (BS_max, M, C of paper section 4.2), and the size of a scoring pack."""

    bs_max: int
    sample_kv_bytes: float  # M
    capacity_kv_bytes: float  # C
    block_tokens: int
    move_cost: MoveCost
    score_tokens: int  # token budget of one scoring pack


def plan_at_threshold(
    threshold: int, states: Sequence[SequenceState], free_blocks: Sequence[int], limits: FusionLimits
) -> MigrationPlan | None:
    """The plan once `threshold` samples remain; None where nothing is left to decode or there is one instance."""
    if not states or len(free_blocks) < 2:
        return None
    m = destination_count(threshold, limits.bs_max, limits.sample_kv_bytes, limits.capacity_kv_bytes, len(free_blocks))
    return plan_migration(states, m, free_blocks, limits.block_tokens, limits.move_cost)


def check_threshold(threshold: int, samples: int) -> None:
    """Raise InputError unless R_t is 0 (serial) or a number of the batch's samples."""
    if not 0 <= threshold <= samples:
        raise InputError(f"R_t = {threshold}: a number from 0 (serial) to the {samples} samples is needed")


def plan_migration(
    states: Sequence[SequenceState],
    destinations: int,
    free_blocks: Sequence[int],
    block_tokens: int,
    cost: MoveCost,
) -> MigrationPlan:
    """Deal the unfinished samples of the freed instances to the `destinations` that hold the most.

    `states`: all unfinished samples, in any order. `free_blocks[i]`: free KV blocks of instance i; only those of
    destinations matter. A sample for which no destination has room moves as tokens and waits. Room is counted for
    its cache and the next token; blocks shared with a sample that moves the same way take room once. Every sample
    is in exactly one of `moves` and `stays`. Raises InputError for states that contradict each other.
    """
    instances = len(free_blocks)
    _check_states(states, instances, destinations)
    held = [0] * instances
    for state in states:
        held[state.instance] += 1
    ranked = sorted(range(instances), key=lambda i: (-held[i], i))
    chosen = tuple(sorted(ranked[:destinations]))
    used = {i: 0 for i in chosen}
    for state in states:
        if state.instance in used:
            used[state.instance] += _blocks(state.tokens, block_tokens)

    room = {i: free_blocks[i] for i in chosen}
    together = defaultdict(lambda: Together(block_tokens))  # (source, destination) -> what moves between them
    moves = []
    leaving = [state for state in states if state.instance not in used]
    for state in sorted(leaving, key=lambda s: (-s.tokens, s.sample_id)):
        by_load = sorted(chosen, key=lambda i: (used[i], i))
        along = {i: together[state.instance, i] for i in chosen}
        whole = _blocks(state.kv_tokens + 1, block_tokens)
        need = {i: whole - along[i].blocks_there(state.shared_blocks) for i in chosen}
        roomy = [i for i in by_load if need[i] <= room[i]]
        mode = along[roomy[0]].mode(cost, state.kv_tokens, state.shared_blocks) if roomy else "tokens"
        destination = roomy[0] if mode == "kv" else by_load[0]
        if mode == "kv":
            room[destination] -= need[destination]
        along[destination].take(mode, state.shared_blocks)
        kv_tokens = state.kv_tokens if mode == "kv" else 0
        moves.append(Move(state.sample_id, state.instance, destination, mode, kv_tokens))
        used[destination] += _blocks(state.tokens, block_tokens)
    return MigrationPlan(
        destinations=chosen,
        freed=tuple(i for i in range(instances) if i not in used),
        moves=tuple(sorted(moves, key=lambda m: (m.destination, m.source, m.sample_id))),
        stays=tuple(sorted(state.sample_id for state in states if state.instance in used)),
    )


def transfer_order(plan: MigrationPlan) -> list[tuple[int, int]]:
    """Pairs (source, destination) with samples to move, in the order in which every instance goes through its own.

    One order for all cannot deadlock: the first pair that is not done has nobody else to wait for. In each round
    different sources talk to different destinations, as far as there are any:  0>4 1>5 2>6, 0>5 1>6 2>4, ...
    """
    pairs = {(move.source, move.destination) for move in plan.moves}
    sources = {instance: place for place, instance in enumerate(plan.freed)}
    targets = {instance: place for place, instance in enumerate(plan.destinations)}
    rounds = max(len(sources), len(targets))

    def place(pair: tuple[int, int]) -> tuple[int, int]:
        source, destination = sources[pair[0]], targets[pair[1]]
        return (destination - source) % rounds, source

    return sorted(pairs, key=place)


def _check_states(states: Sequence[SequenceState], instances: int, destinations: int) -> None:
    if not 1 <= destinations < instances:
        raise InputError(f"{destinations} destinations of {instances} instances; need at least 1 and at most n - 1")
    if len({state.sample_id for state in states}) != len(states):
        raise InputError("two unfinished sequences share a sample id")
    for state in states:
        if not 0 <= state.instance < instances:
            raise InputError(f"sample {state.sample_id} is on instance {state.instance} of {instances}")


def _blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
