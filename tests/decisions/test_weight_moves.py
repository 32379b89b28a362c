"""Weight moves: every byte arrives once, from where it is nearest; across nodes goes what must and no more."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.weight_shards import holders_of, model_shards

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.layout_moves import MoveLoad
from rlhfuse.decisions.shards import Shard, tensor_segments
from rlhfuse.decisions.weight_moves import WeightMoves, in_buckets, plan_moves


def planned(sources, targets, node: int) -> WeightMoves:
    return plan_moves(holders_of(sources), holders_of(targets), node)


def elements(shards) -> dict[int, set[tuple[str, int]]]:
    """rank -> (weight, index of its cut dimension)"""
    held = defaultdict(set)
    for shard in shards:
        held[shard.rank] |= {(shard.tensor, i) for first, stop in shard.segments for i in range(first, stop)}
    return held


def carry_out(transfers, sources, targets, bucket_bytes: int) -> None:
    """Run the buckets on sets of elements, and assert every rule that they must keep."""
    own, wanted = elements(sources), elements(targets)
    arrived: dict[int, set] = defaultdict(set)
    widest = max(shard.row_bytes for shard in [*sources, *targets])
    for bucket in in_buckets(transfers, bucket_bytes):
        new, load = defaultdict(set), defaultdict(int)
        for one in bucket:
            part = {(one.tensor, i) for i in range(one.start, one.stop)}
            assert part <= (arrived if one.forwarded else own)[one.source], f"{one}: the source does not have it yet"
            assert not part & (arrived[one.target] | new[one.target]), f"{one}: sent twice"
            new[one.target] |= part
            if one.source != one.target:
                load[one.source] += one.bytes
                load[one.target] += one.bytes
        assert max(load.values(), default=0) <= max(bucket_bytes, 2 * widest)
        for rank, parts in new.items():
            arrived[rank] |= parts
    assert dict(arrived) == dict(wanted)


def by_hand(sources, targets, node: int) -> int:
    """Bytes of all elements that a node needs and does not have."""
    size = {shard.tensor: shard.row_bytes for shard in targets}
    own, wanted = elements(sources), elements(targets)
    total = 0
    for first in range(0, max(wanted) + 1, node):
        here = range(first, first + node)
        missing = set().union(*(wanted[r] for r in here)) - set().union(*(own[r] for r in here))
        total += sum(size[tensor] for tensor, _ in missing)
    return total


def test_replicas_share_the_load():
    """One stage wanted by eight ranks of a far node: its eight tensor-uncut replicas send an eighth each."""
    sources = [Shard(f"w{n}", rank, ((0, 8),), 10) for n in range(8) for rank in range(8)]
    targets = [Shard(f"w{n}", rank, ((0, 8),), 10) for n in range(8) for rank in range(8, 16)]
    transfers = planned(sources, targets, 8)
    sent, received = defaultdict(int), defaultdict(int)
    for one in transfers:
        if one.source < 8:
            sent[one.source] += one.bytes
            received[one.target] += one.bytes
    assert set(sent.values()) == {80} == set(received.values()) and len(sent) == len(received) == 8
    assert (
        transfers.minimum_across == 640 and MoveLoad.of(transfers, 8).traffic.fullest_sender == 80 * 7
    )  # within the node each forwards one weight


@st.composite
def scattered(draw):
    """Shards of three weights, cut in two for some ranks, held by at least one rank each; two ranks on a node."""
    ranks = st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True)
    sides = []
    for _ in range(2):
        side = []
        for tensor, rows in (("a", 4), ("b", 8), ("c", 6)):
            tp, joined = draw(st.sampled_from([(1, 1), (2, 1), (2, rows // 4 or 1), (1, 1)]))
            cuts = [tensor_segments(rows, joined, t, tp) for t in range(tp)]
            for segments in cuts:
                side += [Shard(tensor, rank, segments, 3) for rank in draw(ranks)]
        sides.append(list({(shard.tensor, shard.rank): shard for shard in side}.values()))
    return sides


@examples(60)
@given(scattered(), st.integers(1, 3), st.integers(1, 40))
def test_any_shards(sides, node, bucket_bytes):
    sources, targets = sides
    try:
        transfers = planned(sources, targets, node)
    except ValueError:
        have = set().union(*elements(sources).values())
        assert set().union(*elements(targets).values()) - have, "refused although every element is held somewhere"
        return
    carry_out(transfers, sources, targets, bucket_bytes)
    least, own, wanted = by_hand(sources, targets, node), elements(sources), elements(targets)
    traffic = MoveLoad.of(transfers, node).traffic
    assert traffic.across == least == transfers.minimum_across
    assert traffic.stays == sum(3 * len(wanted[rank] & own[rank]) for rank in wanted)
    assert traffic.within == sum(shard.bytes for shard in targets) - traffic.stays - least
    assert list(planned(sources[::-1], targets[::-1], node)) == list(transfers)


def test_what_nobody_has_is_named():
    with pytest.raises(ValueError, match=r"no rank has w\[4:8\], which ranks \[1\] need"):
        planned([Shard("w", 0, ((0, 4),), 1)], [Shard("w", 1, ((0, 8),), 1)], 8)


def test_shards_count_every_parameter():
    for tied, head in ((False, False), (True, False), (False, True)):
        spec = ModelSpec("qwen3", 5, 16, 8, 4, 4, 24, 128, 64, tied_embeddings=tied, qk_norm=True)
        shards = model_shards(spec, ParallelLayout(1, 1, 1), (((0,),),), 4, head)
        assert sum(shard.bytes for shard in shards) == 4 * spec.parameters(head)
