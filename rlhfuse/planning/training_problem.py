"""The scheduling problem of a run's training: one mini-batch on one fused group, priced by the run's costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from rlhfuse.config.settings import RunConfig
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.cost_model import CostModel
from rlhfuse.costs.profiled import ProfiledCost
from rlhfuse.costs.stage_cut import MicrobatchTokens
from rlhfuse.decisions.layouts import TASK_ROLES, BatchArithmetic
from rlhfuse.planning.memory import TRAINED
from rlhfuse.schedule.ir.problem import FusionProblem, fused_problem
from rlhfuse.simulator.lengths import SampleLengths

TICK_SECONDS = 1e-6  # schedules are searched in whole microseconds, so that ties are exact


def longest_microbatch(config: RunConfig, batch: BatchArithmetic) -> MicrobatchTokens:
    """Of samples that are as long as they can become."""
    samples, response = batch.samples_per_microbatch, config.rollout.max_response_tokens
    return MicrobatchTokens(samples * (config.data.max_prompt_tokens + response), samples, samples * response)


def training_problem(
    analytic: Mapping[str, AnalyticCost],
    batch: BatchArithmetic,
    lengths: SampleLengths,
    longest: MicrobatchTokens,
    costs: CostModel,
    alternate: bool = True,
    split: Collection[str] = (),
) -> FusionProblem:
    """One mini-batch on one fused group, without a memory cap; backwards of the models in `split` in two parts.

    What a stage computes reaches the next one a `transfer` later, by the slowest hop of any model; the sender goes on.
    Times are for samples of mean `lengths`, in ticks of TICK_SECONDS: measured where `costs` is a ProfiledCost, else
    analytic. Activations are for the `longest`, in bytes.
    """
    each = batch.samples_per_microbatch / len(lengths)
    outputs = each * sum(lengths.output)
    micro = MicrobatchTokens(each * sum(lengths.prompt) + outputs, batch.samples_per_microbatch, outputs)
    stages, layouts = {}, {}
    trained = {task: analytic[task] for task in TRAINED if task in analytic}
    for task, cost in trained.items():
        model = dict(TASK_ROLES)[task]
        if isinstance(costs, ProfiledCost):
            times = costs.stage_costs(model, cost, micro, TICK_SECONDS, model in split)
        else:
            times = cost.stage_costs(micro, TICK_SECONDS, model in split)
        most = cost.stage_costs(longest, split=model in split)
        held = dict(activation=most.activation, weight_activation=most.weight_activation)
        layouts[model], stages[model] = cost.layout, replace(times, **held)
    transfer = max(round(cost.send_seconds(micro.tokens) / TICK_SECONDS) for cost in trained.values())
    return replace(fused_problem(layouts, batch.actor_microbatches, stages, alternate=alternate), transfer=transfer)
