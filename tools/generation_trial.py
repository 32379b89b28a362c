"""A generation trial: prompts of the run's data through the engine, in this process alone.

It shows how long the actor's responses are and what the engine's steps cost, before any run was made. The actor is
loaded whole, so a generation instance of several ranks is measured as one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhfuse.base.clock import Clock
from rlhfuse.base.errors import InputError
from rlhfuse.base.sample_ids import sample_id
from rlhfuse.config.load import model_folder
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.speculation import StepObservation
from rlhfuse.data.prompts import Prompt, prompts_from
from rlhfuse.fusion.inter.generation import IDLE_SECONDS, as_rollout
from rlhfuse.fusion.inter.report import RankEvents, turns_of
from rlhfuse.fusion.inter.tensor_parallel_group import TensorParallelGroup
from rlhfuse.fusion.inter.tools import Pauses, Tools
from rlhfuse.gen.core.sequence import SamplingParams
from rlhfuse.gen.engine import Engine
from rlhfuse.models.tokenizer import with_end_tokens
from rlhfuse.parallel.device import choose_device
from rlhfuse.run.preflight import read_prompts, run_tokenizer
from rlhfuse.run.rank_models import DTYPES, engine_options, sampling_params
from rlhfuse.run.run_tools import find_tools
from rlhfuse.run.sampling.tool_caller import ToolCaller
from rlhfuse.simulator.lengths import SampleLengths, read_turns

WARM_UP_TOKENS = 4  # of a sample before the trial: compiling kernels is no step of a run


@dataclass(frozen=True)
class GenerationTrial:
    """Lengths of the samples, in order, and what the steps took."""

    lengths: SampleLengths
    steps: tuple[StepObservation, ...]


def run_trial(
    config: RunConfig, prompts: int, progress: Callable[[str], None], tools: Tools | None = None
) -> GenerationTrial:
    """Complete the first `prompts` prompts that the run would draw, each once; `progress` is told of every end.

    `tools`: in place of the run's own, which are called if it has some. Raises InputError for a model, a tokenizer,
    data or a tool that a run would refuse.
    """
    folder = model_folder(config.actor.path, "actor.path", weights=True)
    tokenizer = run_tokenizer(config, spec := ModelSpec.from_config(folder))
    spec, _ = with_end_tokens(spec, tokenizer, config.rollout)
    data = read_prompts(config, tokenizer)
    if not len(data):
        raise InputError("data.train_files is empty; give at least one prompt file")
    device = choose_device(config.trainer.device, 0, config.trainer.threads_per_rank)
    dtype = DTYPES[config.trainer.dtype]
    engine = Engine.from_pretrained(folder, engine_options(config, 1), device=device.torch_device, dtype=dtype)
    drawn = [data[index] for index in prompts_from(len(data), config.trainer.seed, 0, prompts)]
    engine.generate([drawn[0].tokens], SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True))
    with nullcontext(tools) if tools else _run_tools(config, spec, tokenizer, drawn) as tools:
        params = replace(sampling_params(config), turns=tools is not None)
        if not params.ignore_eos:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *spec.eos_token_ids))
        return _drawn(engine, [(prompt, params) for prompt in drawn], tools, progress)


@contextmanager
def _run_tools(config: RunConfig, spec: ModelSpec, tokenizer: Any, drawn: Sequence[Prompt]) -> Iterator[Tools | None]:
    """Those of the run, with a journal that nobody keeps; None without."""
    if not (found := find_tools(config, spec, tokenizer, drawn)):
        yield None
        return
    with TemporaryDirectory() as folder, closing(ToolCaller(config, found, 0, Path(folder), leads=True)) as caller:
        caller.begin("trial", drawn)
        yield caller


def _drawn(
    engine: Engine,
    requests: Sequence[tuple[Prompt, SamplingParams]],
    tools: Tools | None,
    progress: Callable[[str], None],
) -> GenerationTrial:
    prompts = len(requests)
    positions = {sample_id(0, position, 0): position for position in range(prompts)}
    for sample, (prompt, params) in zip(positions, requests):
        engine.add(sample, prompt.tokens, params)
    events, rollouts, steps = RankEvents(), {}, []
    pauses = Pauses(tools, engine, TensorParallelGroup((0,), 0, None), events, Clock()) if tools else None
    while len(rollouts) < prompts:
        if pauses:
            pauses.deliver(pauses.announce())
            if not engine.has_unfinished():
                time.sleep(IDLE_SECONDS)
        ended = engine.step()
        if engine.last_step.batch:
            steps.append(engine.last_step.observation())
        ended = pauses.finished(ended) if pauses else ended
        rollouts |= {positions[result.sample_id]: as_rollout(result) for result in ended}
        if ended:
            progress(f"{len(rollouts)} of {prompts} samples finished")
    ordered = [rollouts[position] for position in range(prompts)]
    seen = turns_of(ordered, [events]) if pauses else {}
    lengths = SampleLengths(
        tuple(len(rollout.prompt_tokens) for rollout in ordered),
        tuple(len(rollout.response_tokens) for rollout in ordered),
        turns=read_turns([seen[rollout.sample_id] for rollout in ordered if seen]),
    )
    return GenerationTrial(lengths, tuple(steps))
