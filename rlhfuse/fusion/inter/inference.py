"""Scoring of finished samples by frozen models, each as its role says: log-probabilities, values or a score.

Samples are packed up to a token budget; the result for a sample does not depend on the pack it was in (CPU, float32).
Weights come in from host memory for the first pack, each model while the one before it scores, or earlier where there
is room; they go out afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rlhfuse.base.clock import Clock
from rlhfuse.fusion.inter.iteration_store import IterationStore
from rlhfuse.fusion.inter.tensor_parallel_group import TensorParallelGroup
from rlhfuse.models.stage import PackedTokens, PipelineStage
from rlhfuse.parallel.background import Background
from rlhfuse.parallel.offload import OffloadedWeights
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.tasks.packing import deal
from rlhfuse.tasks.role import Role


@dataclass(frozen=True)
class FrozenModel:
    """One model as inference uses it: its single stage, its offloaded weights and its tensor-parallel group of `ranks`
    ranks. A wider worker has several replicas of it, and each scores its part of a pack."""

    stage: PipelineStage
    offloaded: OffloadedWeights
    tp_group: dist.ProcessGroup
    ranks: int = 1


@dataclass(frozen=True)
class Meeting:
    """All instances have met, at the barrier: what one of them knows there of the whole batch."""

    instance: int  # whose leader this is
    began: Sequence[Sequence[int]]  # ids of the samples that each instance began
    finished: Sequence[Rollout]
    unfinished: Sequence[int]
    store: IterationStore


class Rewarder(Protocol):
    """Scores samples outside the models (`GenInferReport.function_scores`) meanwhile; instances' leaders have one."""

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        """Take finished samples; returns at once."""

    def news(self) -> dict[int, float]:
        """Sample id -> score, of what was scored here since the last time it was asked; returns at once."""
        ...

    def meet(self, meeting: Meeting) -> None:
        """What is unfinished now is submitted on any instance. Called once an iteration, before `finish`."""

    def finish(self) -> dict[int, float]:
        """Sample id -> score, since the last time; all instances together have all. Waits. Raises RewardError."""
        ...

    def take_calls(self) -> tuple[int, int, float]:
        """Samples scored since the last time, how many a worker has under way at once, and the seconds of them all."""
        ...


@dataclass(eq=False)
class Scorer:
    """The models of one worker, which score in this order. Outputs of one kind are added up."""

    models: Mapping[Role, FrozenModel]
    vocab: int
    temperature: float
    device: torch.device
    clock: Clock = Clock()

    def __post_init__(self) -> None:
        self._models = [*self.models.values()]
        self._loaders: list[WeightLoader] = []  # of the first models, and of those after them
        self.waited_seconds = 0.0  # of packs, for weights
        self._begun = 0.0  # when the running model had its own

    @property
    def load_seconds(self) -> float:
        """What bringing in the models took so far, without gaps between them."""
        return sum(loader.seconds for loader in self._loaders)

    def begin_load(self, most: int | None = None) -> None:
        """Start to bring in the first `most` models, or all, one after the other; returns at once.

        A pack waits for each in turn.
        """
        begun = sum(loader.count for loader in self._loaders)
        if missing := [model.offloaded for model in self._models[begun:most]]:
            before = self._loaders[-1] if self._loaders else None
            self._loaders.append(WeightLoader(missing, self.device, before, self.clock))

    def wait_for_first(self) -> None:
        """Until scoring can begin: the first model is there."""
        self.begin_load()
        if self._models:
            self._wait(self._models[0])

    def release(self) -> None:
        """Give the models' device memory back, whether they were loaded or not."""
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()
        for model in self._models:
            model.offloaded.release()

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout], worker: TensorParallelGroup) -> list[Rollout]:
        """One pack, which all ranks of the `worker` have: each rollout with the outputs of the models."""
        self.begin_load()
        ordered = sorted(rollouts, key=lambda r: r.sample_id)
        lengths = [len(one.prompt_tokens) + len(one.response_tokens) for one in ordered]
        given, batches = list[dict[int, Any]](), dict[int, tuple]()  # of each model by position; by number of replicas
        for role, model in self.models.items():
            self._wait(model)
            replicas, own = worker.parts(model.ranks)
            if replicas not in batches:
                places = sorted(deal(lengths, replicas)[own])
                batches[replicas] = places, self._batch([ordered[i] for i in places]) if places else None
            places, batch = batches[replicas]
            given.append(dict(zip(places, self._outputs(role, model, batch))) if places else {})
            self.clock.hold(self._begun, "score", sum(lengths), len(ordered))
        if any(replicas > 1 for replicas in batches):
            every = worker.gather([{i: as_array(of) for i, of in part.items()} for part in given])
            given = [{i: of for part in parts for i, of in part.items()} for parts in zip(*every)]
        scored: dict[str, dict[int, Any]] = {}
        for role, own in zip(self.models, given):
            before = scored.get(role.field)
            scored[role.field] = {i: before[i] + of for i, of in own.items()} if before else own
        return [one.with_scores(**{field: of[i] for field, of in scored.items()}) for i, one in enumerate(ordered)]

    def _batch(self, rollouts: Sequence[Rollout]) -> tuple[PackedTokens, list[torch.Tensor], list[int]]:
        """Their tokens; which predict the drawn ones, which these are, which are last; how many are drawn of each."""
        batch = RolloutBatch.from_rollouts(rollouts)
        others = [batch.prediction_index, batch.tokens[batch.response_index], batch.cu_seqlens[1:].long() - 1]
        packed, places = PackedTokens.beside(others, batch.tokens, batch.cu_seqlens, self.device)
        return packed, places, batch.drawn_lengths.tolist()

    def _outputs(self, role: Role, model: FrozenModel, batch: tuple) -> Sequence[Any]:
        """A model's numbers of each rollout."""
        packed, (predictions, targets, last), drawn = batch
        output: Any = model.stage.forward(packed, None)
        if role.output == "score":
            return output[last].float().tolist()
        if role.output == "value":
            numbers = output[predictions].float()
        else:
            numbers = output.logprobs(predictions, targets, self.vocab, self.temperature)[0]
        return numbers.cpu().split(drawn)

    def _wait(self, model: FrozenModel) -> None:
        waiting = self.clock.begin()
        self.begin_load()
        index = next(i for i, other in enumerate(self._models) if other is model)
        for loader in self._loaders:
            if 0 <= index < loader.count:
                loader.wait(index)
            index -= loader.count
        self.waited_seconds += waiting.seconds
        self._begun = self.clock.now()


def as_array(numbers: Any) -> Any:
    """A tensor as an array of numpy, which is pickled in a tenth of the time; a number as it is."""
    return numbers.numpy() if isinstance(numbers, torch.Tensor) else numbers


class WeightLoader:
    """Loads offloaded models once, in order, in the background: overlapped with compute on those that are there.

    On CUDA their memory is of the stream that computes: what that gave back can serve them, and it gets theirs again.
    """

    def __init__(
        self,
        models: Sequence[OffloadedWeights],
        device: torch.device,
        before: WeightLoader | None = None,
        clock: Clock = Clock(),
    ) -> None:
        """Begins once all models of the loader `before` are there."""
        self._models, self._before, self._clock = models, before, clock
        self.count = len(models)
        for model in models:
            model.allocate()
        self._loaded, self._ready = [clock.Event() for _ in models], 0  # how many are there
        self.seconds = 0.0  # that the models loaded so far took, without gaps
        self._work = Background(self._run, "weight-loader", device, clock)

    def wait(self, index: int) -> None:
        """Until the model at this position can be used. Raises what loading raised."""
        self._loaded[index].wait()
        if index >= self._ready:
            self._work.wait()  # raises

    def close(self) -> None:
        """Until all are there; afterwards they may be released. Raises what loading raised."""
        self._work.wait()

    def _run(self) -> None:
        try:
            if self._before is not None:
                self._before.close()
            for model, loaded in zip(self._models, self._loaded):
                model.await_values()
                with self._clock.work(price=("load",)) as loading:
                    model.copy_in()
                self.seconds += loading.seconds
                self._ready += 1
                loaded.set()
        finally:
            for event in self._loaded:
                event.set()
