"""Receives in their places and into rings, as on CUDA, give the bits of those posted ahead into new memory.

So do messages that are late and a rank that is slow.
"""

import random
import time
from dataclasses import replace

import pytest
import torch
from testkit.program_cases import random_schedule
from testkit.training_pair import Plan, build_pair

from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.receive_slots import receive_slots

SAMPLES = (24, 16, 28)  # of each step, so that micro-batches grow and shrink


def programs_for(plan: Plan, seed: int):
    """A random legal schedule, and its programs with reductions of either kind."""
    split = ((), ("actor", "critic"), ("critic",))[seed % 3]
    schedule = random_schedule(replace(plan, split=split).problem, random.Random(seed))
    return schedule, ("early", "joint")[seed % 2]


def train(rank: int, folders: dict, plan: Plan, seeds, how: str, options: dict) -> list[str]:
    """A digest of the pair after each step; every step runs another random program. With `how`:

    ahead     receives posted ahead, as on CPU
    rings     posted in their places, into rings; a buffer is spoiled as soon as it is free
    blocking  the same, and the rank stands at each receive until it is satisfied
    late      posted ahead, but every message a random time late; and a rank computes at half speed
    """
    from rlhfuse.fusion.intra.p2p import Channels

    class Blocking(Channels):
        def post_in_ring(self, *arguments):
            work, buffer = super().post_in_ring(*arguments)
            work.wait()
            return Done(), buffer

    class Done:
        def is_completed(self):
            return True

        def wait(self):
            pass

    pair, digests = build_pair(rank, folders, plan, **options), []
    groups = pair.roles.channels._groups
    kind = Blocking if how == "blocking" else Channels
    posts_ahead = how in ("ahead", "late")
    channels = kind(rank, groups, torch.device("cpu"), ahead=3 if posts_ahead else 0)
    assert pair.roles.channels.ahead == 3, "as on CPU"
    if how == "late":
        disturb(channels, pair.models, rank)
    for seed in seeds:
        schedule, reduce = programs_for(plan, seed)
        programs = lower(schedule, pair.ranks, reduce=reduce)
        pair.set_step(schedule=schedule, programs=programs, channels=channels)
        for ring in channels.rings.values():
            spoil(ring)
        pair.train(seed, SAMPLES[seed % len(SAMPLES)])
        digests.append(pair.digest())
        if not posts_ahead:
            counts = receive_slots(programs[rank]).counts
            assert all(channels.rings[sender].slots >= count for sender, count in counts.items())
    assert bool(channels.rings) is not posts_ahead
    pair.close()
    return digests


def spoil(ring) -> None:
    """Fill what is free with bytes that are NaN in every type, so that a use after that changes bits."""

    def free(slot: int) -> None:
        ring._buffers[slot].fill_(255)

    ring.free = free


def disturb(channels, models, rank: int) -> None:
    """Wait before each posting, up to 2 ms, one in fifty times 20 ms; rank 2 takes twice as long as it needs."""
    drawn = random.Random(rank)

    def late(post):
        return lambda *given: (time.sleep(0.02 if drawn.random() < 0.02 else 0.002 * drawn.random()), post(*given))[1]

    def slow(work):
        def worked(*given):
            start = time.perf_counter()
            out = work(*given)
            time.sleep(time.perf_counter() - start)
            return out

        return worked

    channels.send, channels.post_receive = late(channels.send), late(channels.post_receive)
    for stage in [stage for model in models.values() for stage in model.stages.values()] if rank == 2 else []:
        stage.forward, stage.backward = slow(stage.forward), slow(stage.backward)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "plan, options, steps",
    [
        (Plan(), {}, 6),
        pytest.param(Plan("d2t1p2v2", "d2t1p2v2"), {}, 3, marks=SLOW),
        (Plan("d1t2p2", "d1t1p4"), {"sequence_parallel": True}, 3),
        (Plan("d1t1p4", "d1t1p4"), {"dtype": "bfloat16", "recompute": "full"}, 3),
        pytest.param(Plan("d1t2p2", "d2t1p2"), {}, 200, marks=SLOW),
    ],
)
def test_random_programs_have_the_same_bits(workers, folders, plan, options, steps):
    ways = ("ahead", "rings", "blocking", "late")
    ahead, *others = (workers.run(train, folders, plan, range(steps), how, options) for how in ways)
    assert others == [ahead] * 3


def lifetimes(rank: int, folders: dict) -> dict:
    """Addresses of the rings' buffers over steps of equal micro-batches, and whether a gradient is in one of them."""
    from rlhfuse.fusion.intra.p2p import Channels

    pair = build_pair(rank, folders)
    channels = Channels(rank, pair.roles.channels._groups, torch.device("cpu"), ahead=0)
    pair.set_step(channels=channels)
    inside = []
    for model in pair.models.values():
        for stage in model.stages.values():
            stage.backward = watched(stage.backward, channels, inside)
    addresses = []
    for seed in (0, 0, 0):
        pair.train(seed)
        addresses.append([b.data_ptr() for ring in channels.rings.values() for b in ring._buffers])
    held = sum(buffer.nbytes for ring in channels.rings.values() for buffer in ring._buffers)
    pair.close()
    return {"addresses": addresses, "inside": inside, "held": held}


def watched(backward, channels, inside):
    def run(microbatch, gradient):
        out = backward(microbatch, gradient)
        buffers = {b.untyped_storage().data_ptr() for ring in channels.rings.values() for b in ring._buffers}
        if out is not None:
            inside.append(out.untyped_storage().data_ptr() in buffers)
        return out

    return run


def test_buffers_live_as_long_as_the_run_and_hold_nothing_that_is_sent(workers, folders):
    for seen in workers.run(lifetimes, folders):
        assert seen["addresses"][0] == seen["addresses"][1] == seen["addresses"][2] and seen["held"]
        assert seen["inside"] and not any(seen["inside"])
