"""What generation and inference may choose from on a mesh: tensor degrees, and of generation how much cache it has;
each with seconds of an iteration and bytes of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from placements.problem import Option
from placements.run_work import RunWork

from rlhfuse.config.role import Role
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.job_cost import JobCost
from rlhfuse.decisions.packing import deal, scoring_packs, split_samples
from rlhfuse.planning.draft import instance_limits
from rlhfuse.planning.instance_cache import InstanceCache
from rlhfuse.simulator.instance_limits import InstanceLimits
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.seconds import gen_infer_seconds

CACHES = (1, 2, 4, 8)  # of the cache that has room for all samples at full length: the whole, a half, ...


def generation_options(
    work: RunWork, ranks: int, hardware: HardwareSpec, world_size: int, room: float
) -> Iterator[Option]:
    """By simulation without migration, mean over the batches; what is larger than `room` is left out.

    Less memory is never priced as faster, though its order of admissions may be luckier, as in a plan's price.
    """
    rollout = work.config.rollout
    for layout in work.layouts("generation", ranks, hardware.devices_per_node):
        cost = work.cost("generation", layout, hardware)
        drawing = min(rollout.max_sequences_per_instance, rollout.max_batched_tokens)
        passing = cost.memory.weights_bytes() + cost.memory.prefilling_bytes(rollout.max_batched_tokens, drawing)
        passing += work.config.fusion.bucket_mib << 20
        passing += cost.memory.rotation_bytes(cost.spec.context)
        passing += cost.memory.graph_bytes(drawing) if rollout.cuda_graphs else 0
        caches = [(limits, passing + limits.kv_capacity_bytes / layout.tp) for limits in _caches(work, cost)]
        if min(need for _, need in caches) > room:
            continue
        most, fetch, known = _most_tokens(work, layout.dp), _fetch_seconds(cost, world_size), {}
        for limits, need in caches:
            if known and need > room:  # the first is simulated even so: what others are held to
                continue
            tokens = min(limits.kv_capacity_tokens, most)  # more are never used
            if tokens not in known:
                simulated = gen_infer_seconds(work.inputs.drawn.batches, layout.dp, JobCost(cost, ()), limits, [0])[0]
                known[tokens] = max([simulated.generation, *known.values()])
            if need <= room:
                yield Option(layout, known[tokens], 0.0, need, fetch, f"KV of {limits.kv_capacity_tokens} tokens")


def scoring_options(
    work: RunWork, task: str, ranks: int, hardware: HardwareSpec, world_size: int, room: float
) -> Iterator[Option]:
    """Options to score with one model: its weights come from the host, the critic's from its training first; replicas
    share the batch by tokens and score in packs; mean over the batches."""
    budget = work.config.rollout.max_batched_tokens
    for layout in work.layouts(task, ranks, hardware.devices_per_node):
        cost = work.cost(task, layout, hardware)
        need = cost.memory.weights_bytes() + cost.memory.scoring_bytes(budget)
        need += cost.memory.rotation_bytes(work.longest_tokens)
        if need > room:
            continue
        costs = JobCost(cost, (cost,), output_share=work.inputs.lengths.samples.output_share)
        seconds = fmean(_scored_seconds(batch, layout.dp, costs, budget) for batch in work.inputs.drawn.batches)
        loaded, fetch = costs.swap_in_seconds(), 0.0
        if task == f"{Role.CRITIC}_inference":
            loaded, fetch = 0.0, 2 * loaded + _fetch_seconds(cost, world_size)  # rests on the host until then
        yield Option(layout, loaded + seconds, 0.0, need, fetch)


def _scored_seconds(batch: SampleLengths, replicas: int, costs: JobCost, budget: int) -> float:
    """Seconds of the slowest replica."""
    tokens, slowest = [prompt + output for prompt, output in zip(batch.prompt, batch.output)], 0.0
    for share in deal(tokens, replicas):
        own = [tokens[sample] for sample in share]
        packs = scoring_packs(own, 1, budget)
        slowest = max(slowest, sum(costs.score_seconds(sum(own[i] for i in pack), len(pack)) for pack in packs))
    return slowest


def _caches(work: RunWork, cost: AnalyticCost) -> Iterator[InstanceLimits]:
    """Caches of one instance, from the largest; no smaller one than a sample needs."""
    cache, context = InstanceCache.of(work.config, cost.layout.dp), work.inputs.drawn.batches[0].median_context
    counts = {max(cache.least, -(-cache.wanted // part)) for part in ((1,) if cache.given else CACHES)}
    for blocks in sorted(counts, reverse=True):
        yield instance_limits(work.run, replace(cache, left=blocks), JobCost(cost, ()), context)


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
