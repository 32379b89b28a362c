"""What generation and inference may choose from on a mesh: tensor degrees, and of generation how much cache it has;
each with seconds of an iteration and bytes of a rank, as a plan has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from placements.problem import Option
from placements.run_work import RunWork

from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.analytic_table import analytic_table
from rlhfuse.planning.candidate import instance_limits
from rlhfuse.planning.memory.instance_cache import InstanceCache
from rlhfuse.planning.memory.memory_budget import GenerationMemory
from rlhfuse.simulator.simulation import Simulation
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.packing import split_samples
from rlhfuse.tasks.task import DESTINATIONS

CACHES = (1, 2, 4, 8)  # of the cache that has room for all samples at full length: the whole, a half, ...


def generation_options(
    work: RunWork, ranks: int, hardware: HardwareSpec, world_size: int, room: float
) -> Iterator[Option]:
    """By simulation without migration, mean over the batches; what is larger than `room` is left out.

    Less memory is never priced as faster, though its order of admissions may be luckier, as in a plan's price.
    """
    for layout in work.layouts("generation", ranks, hardware.devices_per_node):
        cost = work.cost("generation", layout, hardware)
        beside = cost.memory.rotation_bytes(work.longest_tokens) + (work.config.fusion.bucket_mib << 20)
        caches = []
        for limits in _caches(work, cost):
            memory = GenerationMemory.of(cost.memory, work.config.rollout, limits.kv_capacity_bytes)
            caches.append((limits, memory.device + memory.decoding + beside))
        if min(need for _, need in caches) > room:
            continue
        most, fetch, known = _most_tokens(work, layout.dp), _fetch_seconds(cost, world_size), {}
        for limits, need in caches:
            if known and need > room:  # the first is simulated even so: what others are held to
                continue
            tokens = min(limits.kv_capacity_tokens, most)  # more are never used
            if tokens not in known:
                simulation = Simulation(work.inputs.drawn.batches, layout.dp, analytic_table(cost), limits)
                known[tokens] = max([simulation.seconds([0])[0].generation, *known.values()])
            if need <= room:
                yield Option(layout, known[tokens], 0.0, need, fetch, f"KV of {limits.kv_capacity_tokens} tokens")


def scoring_options(
    work: RunWork, task: str, ranks: int, hardware: HardwareSpec, world_size: int, room: float
) -> Iterator[Option]:
    """Options to score with one model: its weights come from the host, the critic's from its training first; then by
    simulation, as after a generation on as many instances as there are replicas."""
    batches, output_share = work.inputs.drawn.batches, work.inputs.lengths.samples.output_share
    for layout in work.layouts(task, ranks, hardware.devices_per_node):
        cost = work.cost(task, layout, hardware)
        need = cost.memory.weights_bytes() + cost.memory.scoring_bytes(work.config.rollout.max_batched_tokens)
        need += cost.memory.rotation_bytes(work.longest_tokens)
        if need > room:
            continue
        costs = analytic_table(cost, (cost,), output_share=output_share)
        limits = instance_limits(work.run, InstanceCache.of(work.config, layout.dp), costs, batches[0], 1)
        limits = replace(limits, scoring_models=1, reward_workers=0)
        simulated = Simulation(batches, layout.dp, costs, limits).seconds([0])[0]
        seconds, fetch = simulated.total - simulated.generation, 0.0
        if task in DESTINATIONS.values():  # rests on the host until then
            loading = costs.swap_in
            seconds, fetch = seconds - loading, 2 * loading + _fetch_seconds(cost, world_size)
        yield Option(layout, seconds, 0.0, need, fetch)


def _caches(work: RunWork, cost: AnalyticCost) -> Iterator[InstanceLimits]:
    """Caches of one instance, from the largest; no smaller one than a sample needs."""
    cache, lengths = InstanceCache.of(work.config, cost.layout.dp), work.inputs.drawn.batches[0]
    counts = {max(cache.least, -(-cache.wanted // part)) for part in ((1,) if cache.given else CACHES)}
    for blocks in sorted(counts, reverse=True):
        yield instance_limits(work.run, replace(cache, left=blocks), analytic_table(cost), lengths, 1)


def _most_tokens(work: RunWork, instances: int) -> int:
    """That the fullest instance of any batch could hold at once, one more for each sample's next token."""
    most = 0
    for batch in work.inputs.drawn.batches:
        held = [prompt + output + 1 for prompt, output in zip(batch.prompt, batch.output)]
        shares = split_samples(len(held), instances)
        most = max(most, *(sum(held[sample] for sample in share) for share in shares))
    return most


def _fetch_seconds(cost: AnalyticCost, world_size: int) -> float:
    """Bringing a model's weights here from another layout (`weight_moves.plan_moves`): where there are several nodes,
    each is sent the model once, shared by its links; then every rank has its part from its node."""
    machine, layout = cost.hardware, cost.layout
    seconds = cost.memory.weights_bytes() / machine.node_link_bandwidth
    if world_size <= machine.devices_per_node:
        return seconds
    links = min(layout.size, machine.devices_per_node)
    return seconds + layout.tp * cost.memory.weights_bytes() / links / machine.cross_link_bandwidth
