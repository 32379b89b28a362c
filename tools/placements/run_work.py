"""What a run does in an iteration, whatever its layouts: models, a batch of samples, and how it is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.role import Role
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.cost_model import MicrobatchTokens
from rlhfuse.costs.machine import SharedCores
from rlhfuse.decisions.layouts import TASK_ROLES, Task, possible_layouts
from rlhfuse.planning.draft import DraftInputs, task_costs
from rlhfuse.planning.drawn_batches import DrawnBatches

ENDLESS_GB = 1e6  # of a rank


@dataclass(frozen=True)
class RunWork:
    """`config` has numbers where they may be auto; its layouts do not matter. `drawn`: the batches that the run's plan
    is for; `output_share`: part of the tokens that are of responses; `cuts`: what training's sequence_parallel may be.

    Ranks on a part of a machine have that part of its cores.
    """

    config: RunConfig
    specs: Mapping[Role, ModelSpec]
    drawn: DrawnBatches
    output_share: float
    cores: SharedCores
    cuts: tuple[bool, ...]

    @staticmethod
    def of(config: RunConfig, specs: Mapping[Role, ModelSpec], inputs: DraftInputs) -> RunWork:
        """Work of a run, whether or not it has a plan; its cache is as large as memory allows unless it asks for
        another. `config` has numbers but for layouts, micro-batches and recomputation."""
        planned, cut = inputs.lengths.samples, config.parallel.sequence_parallel
        responses = sum(planned.output) / (sum(planned.prompt) + sum(planned.output))
        cuts = (False, True) if cut == AUTO else (bool(cut),)
        return RunWork(config, specs, inputs.drawn, responses, inputs.cores, cuts)

    @property
    def with_all_memory(self) -> RunWork:
        """The same on ranks whose memory never ends."""
        return replace(self, config=self.config.with_(trainer={"memory_limit_gb": ENDLESS_GB}))

    @property
    def samples_per_minibatch(self) -> int:
        return self.config.samples_per_iteration // int(self.config.algorithm.minibatches)

    @property
    def optimizer_steps(self) -> int:
        return int(self.config.algorithm.minibatches) * self.config.algorithm.epochs

    def longest_microbatch(self, samples: float) -> MicrobatchTokens:
        """Micro-batch of so many samples that are as long as they can become."""
        prompt, response = self.config.data.max_prompt_tokens, self.config.rollout.max_response_tokens
        return MicrobatchTokens(samples * (prompt + response), samples, samples * response)

    def cost(
        self,
        task: str,
        layout: ParallelLayout,
        hardware: HardwareSpec,
        recompute: str = "",
        sequence_parallel: bool | None = None,
    ) -> AnalyticCost:
        """The roofline of a task in a layout; the last two: in place of what `config` says."""
        tasks = [Task(task, dict(TASK_ROLES)[task], layout, (0, layout.size - 1))]
        how = {"recompute": recompute, "sequence_parallel": sequence_parallel}
        return task_costs(self.config, self.specs, tasks, hardware, self.cores, **how)[task]

    def layouts(self, task: str, ranks: int, devices_per_node: int) -> Iterator[ParallelLayout]:
        """Layouts of a task on so many ranks: whole tensor groups in a node, pipelines for training alone, and a sample
        at least for each replica."""
        role, trains = dict(TASK_ROLES)[task], task.endswith("_train")
        most = self.samples_per_minibatch if trains else self.config.samples_per_iteration
        return possible_layouts(self.specs[role], ranks, devices_per_node, most, (1,) if trains else ())
