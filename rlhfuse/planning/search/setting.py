"""What all tables of a search share: the run, its lengths, its machine and its measured costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.base.remembered import remembered
from rlhfuse.config.values import Recompute
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.forms.training import MicrobatchTokens, StageSeconds
from rlhfuse.costs.layout_moves import layout_moves
from rlhfuse.costs.profile_files import run_costs
from rlhfuse.costs.table import CostTable
from rlhfuse.decisions.layouts import training_layouts
from rlhfuse.planning.candidate import Candidate, CandidateInputs, draft_plan, instance_limits
from rlhfuse.planning.job import Job
from rlhfuse.planning.memory.instance_cache import CACHE_PARTS, SPARE_BLOCKS, InstanceCache
from rlhfuse.planning.price import Moves
from rlhfuse.planning.rooflines import Rooflines
from rlhfuse.planning.search.space import Given
from rlhfuse.planning.search.table import Inference, Table
from rlhfuse.planning.training.split_choice import given_split
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.placement import instances_per_worker
from rlhfuse.tasks.role import Role
from rlhfuse.tasks.task import TASKS, ModelTask


@dataclass(frozen=True)
class GenerationBytes:
    """The actor's copy; a cache with room for all samples, and for the longest alone; the models that score; what a
    cache that memory cuts down may leave free, 0 where its size is given."""

    copy: float
    cache: float
    sample: float
    scorers: float
    cut: float = 0.0

    @property
    def least(self) -> float:
        """Beside which the weights of the models that train must have room."""
        return max(self.copy + self.sample, self.scorers)


@dataclass(frozen=True)
class Setting:
    """`split`: models whose backwards `run` splits; None: each table's draft chooses. `notes`: lines on what is open in
    it and not in the search."""

    run: Job
    given: Given
    inputs: CandidateInputs
    split: frozenset[str] | None
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(run: Job, lengths: SampleLengths | None = None, given: Given | None = None) -> Setting:
        """`given`: in place of what `run` gives. Raises InputError for costs that hold for one table alone."""
        config = run.config
        given = given or Given.of(config)
        split, notes = given_split(config.fusion, config.trained()), ()
        inputs = CandidateInputs.of(run, lengths)
        forwards = bool(given.generation), len(given.inference)
        if inputs.measured and inputs.measured.of_one_run and forwards != (True, max(1, len(config.scorers()))):
            raise InputError(
                f"fusion.profile={config.fusion.profile} was measured by a run in its layouts and says nothing of "
                "others; use what tools/profile_costs.py --tensor 1,2,4 writes, or leave it empty"
            )
        if inputs.measured is not None:
            unmeasured = {"trainer.recompute": given.recompute, "parallel.sequence_parallel": given.sequence_parallel}
            given = replace(given, recompute=given.recompute or "none", sequence_parallel=bool(given.sequence_parallel))
            keys = " and ".join(f"{key}=auto" for key, value in unmeasured.items() if value is None)
            told = f"{keys}: not searched, as fusion.profile={config.fusion.profile} has no times of them; they are off"
            notes = (told,) if keys else ()
        return Setting(run, given, inputs, split, notes)

    def may_split(self, model: str) -> tuple[bool, ...]:
        """Whether a draft has the model's backwards in two parts, or both answers."""
        return (False, True) if self.split is None else (model in self.split,)

    @cached_property
    def rooflines(self) -> Rooflines:
        return Rooflines.of(self.run, self.inputs.hardware, self.inputs.cores)

    def draft(self, table: Table, whole: bool = False) -> Candidate:
        """`whole`: with whole backwards wherever the configuration lets a draft choose, for all that they do not
        change: a split one needs no less memory. Raises InputError where it cannot run."""
        config = table.of(self.run.config)
        if whole and self.split is None:
            config = config.with_(fusion={"split_backward": "false"})
        return draft_plan(self.run.with_config(config), inputs=self.inputs)

    @remembered
    def training_cost(
        self, role: Role, layout: ParallelLayout, recompute: Recompute, sequence_parallel: bool
    ) -> AnalyticCost:
        """The price of whole layers that are cut evenly."""
        rooflines = replace(self.rooflines, recompute=recompute, sequence_parallel=sequence_parallel)
        return rooflines.cost(*self._trainings({role: layout}))

    def stage_seconds(self, role: str, roofline: AnalyticCost, micro: MicrobatchTokens) -> StageSeconds:
        """As `CostTable.stage_seconds`. Raises InputError also where the tensor degree was not measured."""
        if self.inputs.measured is None:
            return roofline.stage_seconds(micro)
        return self.inputs.measured.at(roofline.layout.tp).stage_seconds(role, roofline, micro)

    def generation_costs(self, table: Table) -> CostTable:
        """Whatever trains. Raises InputError where a profile does not have the degrees of the other rows."""
        tasks = self._forwards(table.generation, table.inference)
        if self.inputs.measured is not None:
            tasks += self._trainings(dict.fromkeys(self.run.config.trained(), table.generation))
            return run_costs(
                self.inputs.measured, self.run.config.trainer, tasks, self.run.specs, self.run.config.fusion.profile
            )
        prompt, response = self.run.config.longest_sample
        longest = SampleLengths((prompt,), (response,))
        return self.rooflines.table(self.rooflines.costs(tasks), self.run.world_size, longest)

    def limits(self, table: Table, costs: CostTable) -> InstanceLimits:
        """With room for all samples of an instance."""
        cache = InstanceCache.of(self.run.config, table.generation.dp)
        spanned = instances_per_worker(self._forwards(table.generation, table.inference))
        return instance_limits(self.run, cache, costs, self.inputs.lengths.samples, spanned)

    def generation_bytes(self, table: Table, limits: InstanceLimits) -> GenerationBytes:
        """Bytes of generation on every rank."""
        rooflines = self.rooflines.costs(self._forwards(table.generation, table.inference))
        copy, *scorers = (cost.memory.weights_bytes() for cost in rooflines.values())
        tp = table.generation.tp
        cache, block = limits.kv_capacity_bytes / tp, limits.block_tokens * limits.kv_bytes_per_token / tp
        cut = (
            0.0 if self.run.config.rollout.kv_blocks_per_instance else cache / CACHE_PARTS + (1 + SPARE_BLOCKS) * block
        )
        return GenerationBytes(copy, cache, limits.sample_kv_bytes / tp, sum(scorers), cut)

    @remembered
    def move_seconds(
        self, trained: tuple[tuple[Role, ParallelLayout], ...], generation: ParallelLayout, inference: Inference
    ) -> Moves:
        """Seconds that weights move in an iteration; `trained`: with the layers of each stage."""
        tasks = (*self._forwards(generation, inference), *self._trainings(dict(trained)))
        ranks = rank_map(training_layouts(tasks), self.run.config.fusion.alternates)
        machine = self.inputs.cores.rates(self.inputs.hardware, "moves")
        moves = layout_moves(tasks, ranks, self.run.specs, self.run.config.trainer.element_bytes, machine)
        return Moves.of(moves)

    def _forwards(self, generation: ParallelLayout, inference: Inference) -> list[ModelTask]:
        """Tasks that train nothing, generation first."""
        rows = ("generation", generation), *inference
        return [ModelTask.of(row, layout, self.run.world_size) for row, layout in rows if row in TASKS]

    def _trainings(self, layouts: Mapping[Role, ParallelLayout]) -> list[ModelTask]:
        return [ModelTask.of(f"{role}_train", layout, self.run.world_size) for role, layout in layouts.items()]
