"""Who moves where when the long tail begins: the migration plan, as a value (paper section 4.2).

Every rank computes the same plan from the same numbers; the simulator and the runtime share it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from numba.extending import register_jitable

from rlhfuse.base.errors import InputError
from rlhfuse.tasks.instance_limits import InstanceLimits, MoveMode, SampleMoveCost


@dataclass(frozen=True)
class UnfinishedSample:
    """An unfinished sample as its instance sees it.

    `tokens`: prompt and response so far; `kv_tokens`: those whose keys and values are in the cache, 0 if it waits
    (never started, or preempted); `shared_blocks`: names, on its instance, of full KV blocks that others use too.
    """

    sample_id: int
    instance: int
    tokens: int
    kv_tokens: int
    shared_blocks: tuple[int, ...] = ()


class SharedBlocks:
    """KV blocks that samples moving between one pair of instances share: sent, or run again, once."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._sent: set[int] = set()  # blocks that travel
        self._present: set[int] = set()  # blocks that will be there, sent or run again

    def count_sent(self, shared_blocks: Iterable[int]) -> int:
        """How many of a further sample's blocks travel with those before it."""
        return len(self._sent.intersection(shared_blocks))

    def mode(self, cost: SampleMoveCost, kv_tokens: int, shared_blocks: Sequence[int]) -> MoveMode:
        """The quicker way for a further sample, after those before it; "tokens" for one with nothing to send."""
        if not kv_tokens:
            return "tokens"
        sent = kv_tokens - self._block_tokens * self.count_sent(shared_blocks)
        run = kv_tokens - self._block_tokens * len(self._present.intersection(shared_blocks))
        return cost.mode(sent, run)

    def add(self, mode: MoveMode, shared_blocks: Iterable[int]) -> None:
        """Count a sample in that moves this way."""
        self._present.update(shared_blocks)
        if mode == "kv":
            self._sent.update(shared_blocks)


_MOVE = re.compile(r"(\d+):(\d+)>(\d+) (kv|tokens) (\d+)")


@dataclass(frozen=True)
class SampleMove:
    """A sample of whose cache `kv_tokens` travel. Prints as `17:3>0 kv 412`: sample 17, instance 3 to 0."""

    sample_id: int
    source: int
    destination: int
    mode: MoveMode
    kv_tokens: int

    def __str__(self) -> str:
        return f"{self.sample_id}:{self.source}>{self.destination} {self.mode} {self.kv_tokens}"

    @staticmethod
    def parse(text: str) -> SampleMove:
        """Inverse of `str`. Raises InputError on anything else."""
        match = _MOVE.fullmatch(text.strip())
        if not match:
            raise InputError(f"move {text!r} is not of the form 17:3>0 kv 412")
        mode: MoveMode = "kv" if match[4] == "kv" else "tokens"
        return SampleMove(int(match[1]), int(match[2]), int(match[3]), mode, int(match[5]))


@dataclass(frozen=True)
class MigrationPlan:
    """The instances that go on decoding, those that are freed, the moves, and the samples that stay."""

    destinations: tuple[int, ...]
    freed: tuple[int, ...]
    moves: tuple[SampleMove, ...]  # ordered by destination, then source, then sample
    stays: tuple[int, ...]  # sample ids

    def moves_from(self, instance: int) -> tuple[SampleMove, ...]:
        return tuple(move for move in self.moves if move.source == instance)

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
                moves.append(SampleMove.parse(rest))
            elif word in ("destinations", "freed", "stays") and all(part.isdigit() for part in rest.split()):
                groups[word] = tuple(map(int, rest.split()))
            else:
                raise InputError(f"migration plan: line {line!r} is not destinations, freed, stays or move")
        if len(groups) != 3:
            raise InputError("migration plan: the lines destinations, freed and stays are all needed")
        return MigrationPlan(groups["destinations"], groups["freed"], tuple(moves), groups["stays"])


def plan_at_threshold(
    threshold: int, states: Sequence[UnfinishedSample], free_blocks: Sequence[int], limits: InstanceLimits
) -> MigrationPlan | None:
    """The plan once `threshold` samples remain; None where nothing is left to decode or there is one instance."""
    if not states or len(free_blocks) < 2:
        return None
    assert limits.move_cost is not None, "limits have been priced"
    m = limits.destinations(threshold, len(free_blocks))
    more = limits.block_tokens, limits.move_cost, limits.instances_per_worker
    return plan_migration(states, m, free_blocks, *more)


def check_threshold(threshold: int, samples: int) -> None:
    """Raise InputError unless R_t is 0 (serial) or a number of the batch's samples."""
    if not 0 <= threshold <= samples:
        raise InputError(f"R_t = {threshold}: a number from 0 (serial) to the {samples} samples is needed")


def plan_migration(
    states: Sequence[UnfinishedSample],
    destinations: int,
    free_blocks: Sequence[int],
    block_tokens: int,
    cost: SampleMoveCost,
    instances_per_worker: int = 1,
) -> MigrationPlan:
    """Deal the unfinished samples of the freed instances to as many `destinations` (`most_holding`).

    Largest first, each to the destination with the fewest KV blocks in use that has room; with its keys and values
    where that is quicker than computing them again, otherwise as tokens.

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
    chosen = tuple(sorted(most_holding(held, destinations, instances_per_worker)))
    used = {i: 0 for i in chosen}
    for state in states:
        if state.instance in used:
            used[state.instance] += blocks(state.tokens, block_tokens)

    room = {i: free_blocks[i] for i in chosen}
    shared = defaultdict(lambda: SharedBlocks(block_tokens))  # by (source, destination)
    moves = []
    leaving = [state for state in states if state.instance not in used]
    for state in sorted(leaving, key=lambda s: (-s.tokens, s.sample_id)):
        by_load = sorted(chosen, key=lambda i: (used[i], i))
        along = {i: shared[state.instance, i] for i in chosen}
        whole = blocks(state.kv_tokens + 1, block_tokens)
        need = {i: whole - along[i].count_sent(state.shared_blocks) for i in chosen}
        roomy = [i for i in by_load if need[i] <= room[i]]
        mode = along[roomy[0]].mode(cost, state.kv_tokens, state.shared_blocks) if roomy else "tokens"
        destination = roomy[0] if mode == "kv" else by_load[0]
        if mode == "kv":
            room[destination] -= need[destination]
        along[destination].add(mode, state.shared_blocks)
        kv_tokens = state.kv_tokens if mode == "kv" else 0
        moves.append(SampleMove(state.sample_id, state.instance, destination, mode, kv_tokens))
        used[destination] += blocks(state.tokens, block_tokens)
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


def _check_states(states: Sequence[UnfinishedSample], instances: int, destinations: int) -> None:
    if not 1 <= destinations < instances:
        raise InputError(f"{destinations} destinations of {instances} instances; need at least 1 and at most n - 1")
    if len({state.sample_id for state in states}) != len(states):
        raise InputError("two unfinished sequences share a sample id")
    for state in states:
        if not 0 <= state.instance < instances:
            raise InputError(f"sample {state.sample_id} is on instance {state.instance} of {instances}")


@register_jitable(error_model="numpy")
def most_holding(held, count, per_worker):
    """`count` instances that hold the most samples, `held` by instance, of as few workers as possible.

    Every `per_worker` instances are one worker, which scores nothing while one of them decodes. Those of the worker
    that holds the most come first. Ties go to the lower number.
    """
    sums = [0 for _ in range(-(-len(held) // per_worker))]
    for instance in range(len(held)):
        sums[instance // per_worker] += held[instance]
    chosen, left = [0 for _ in range(0)], [True for _ in range(len(held))]
    for _ in range(count):
        best, most = -1, (-1, 0, -1)
        for instance in range(len(held)):
            worker = instance // per_worker
            if left[instance] and (sums[worker], -worker, held[instance]) > most:
                best, most = instance, (sums[worker], -worker, held[instance])
        chosen.append(best)
        left[best] = False
    return chosen


@register_jitable(error_model="numpy", _nrt=False)
def blocks(tokens, block_tokens):
    """KV blocks of so many tokens."""
    return -(-tokens // block_tokens)
