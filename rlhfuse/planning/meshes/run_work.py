"""What a run does in an iteration, whatever its layouts: models, a batch of samples, and how it is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from rlhfuse.base.errors import InputError
from rlhfuse.config.role import Role
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import HardwareSpec, ModelSpec, ParallelLayout
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.stage_cut import MicrobatchTokens
from rlhfuse.decisions.layouts import TASK_ROLES, Task
from rlhfuse.planning.draft import task_cost
from rlhfuse.simulator.lengths import SampleLengths


@dataclass(frozen=True)
class RunWork:
    """`config` has numbers where they may be auto; its layouts do not matter. `lengths`: of the batch of an iteration,
    each cut to what the run can make."""

    config: RunConfig
    specs: Mapping[Role, ModelSpec]
    lengths: SampleLengths

    @staticmethod
    def of(config: RunConfig, specs: Mapping[Role, ModelSpec], lengths: SampleLengths | None) -> RunWork:
        """A batch drawn from past lengths; where none are known all samples are as long as they can become."""
        prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
        samples = config.samples_per_iteration
        if lengths is None:
            return RunWork(config, specs, SampleLengths((prompt,) * samples, (response,) * samples))
        return RunWork(config, specs, lengths.clip(prompt, response).draw(samples, 1, config.trainer.seed)[0])

    @property
    def samples_per_minibatch(self) -> int:
        return len(self.lengths) // self.config.algorithm.minibatches

    @property
    def optimizer_steps(self) -> int:
        return self.config.algorithm.minibatches * self.config.algorithm.epochs

    @cached_property
    def tokens(self) -> list[int]:
        """Of each sample, prompt and response."""
        return [prompt + output for prompt, output in zip(self.lengths.prompt, self.lengths.output)]

    @property
    def output_share(self) -> float:
        """Part of the tokens that are of responses."""
        return sum(self.lengths.output) / sum(self.tokens)

    def microbatch(self, samples: float) -> MicrobatchTokens:
        """Of so many samples of mean length."""
        each = samples / len(self.lengths)
        return MicrobatchTokens(each * sum(self.tokens), samples, each * sum(self.lengths.output))

    def longest_microbatch(self, samples: float) -> MicrobatchTokens:
        """Of so many samples that are as long as they can become."""
        prompt, response = self.config.data.max_prompt_tokens, self.config.rollout.max_response_tokens
        return MicrobatchTokens(samples * (prompt + response), samples, samples * response)

    def cost(self, task: str, layout: ParallelLayout, hardware: HardwareSpec) -> AnalyticCost:
        """The roofline of a task in a layout."""
        role = dict(TASK_ROLES)[task]
        return task_cost(self.config, self.specs[role], Task(task, role, layout, (0, layout.size - 1)), hardware)

    def layouts(self, task: str, ranks: int, devices_per_node: int) -> Iterator[ParallelLayout]:
        """Of a task on so many ranks: whole tensor groups in a node, pipelines for training alone, and a sample at
        least for each replica."""
        role, trains = dict(TASK_ROLES)[task], task.endswith("_train")
        most = self.samples_per_minibatch if trains else len(self.lengths)
        for tp in divisors(devices_per_node):
            if ranks % tp:
                continue
            for pp in divisors(ranks // tp) if trains else (1,):
                layout = ParallelLayout(ranks // (tp * pp), tp, pp)
                if layout.dp <= most and _cuts(layout, self.specs[role]):
                    yield layout


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _cuts(layout: ParallelLayout, spec: ModelSpec) -> bool:
    try:
        layout.check_model(spec, "")
    except InputError:
        return False
    return True
