"""One rank of the inter-stage benchmark: a generation instance and an inference worker, as the trainer builds them.

All runs generate and score the same samples, so every run must leave the same bits in tokens, log-probabilities,
values and rewards: `digest`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from inter_stage import BLOCK_TOKENS, ROLES, Sizes
from processes import TIMEOUT_SECONDS
from random_models import ModelRank, together

from rlhfuse.base.clock import Clock
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.fusion.inter.inference import FrozenModel, Scorer
from rlhfuse.fusion.inter.inter_stage import InterStage
from rlhfuse.fusion.inter.rank_place import RankPlace
from rlhfuse.fusion.inter.request import Request
from rlhfuse.gen.core.sequence import SamplingParams
from rlhfuse.gen.engine import Engine, EngineOptions
from rlhfuse.gen.migration.kv_transfer import BUCKET_BYTES
from rlhfuse.models.hf import load_weights
from rlhfuse.models.stage import PipelineStage
from rlhfuse.parallel.groups import plain_grid
from rlhfuse.parallel.offload import OffloadedWeights
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.placement import Placement
from rlhfuse.tasks.role import role_named

FIRST_TOKEN = 3  # those below may mean something to a model


class FusionRank(ModelRank):
    """The models of one size on this rank."""

    def __init__(self, rank: int, sizes: dict[str, Any], seed: int, clock: Clock | None = None) -> None:
        clock, self.sizes, self.seed = clock or Clock(rank), Sizes(**sizes), seed
        super().__init__(rank, self.sizes.instances)
        self.grid = plain_grid(ParallelLayout(self.sizes.instances, 1, 1))
        modules = {role: self._model(role) for role in ROLES if role != "actor" or not self.sizes.policy}
        spec, rows = self.sizes.spec("actor"), self.sizes.draft_rows
        options = EngineOptions(self.sizes.blocks, BLOCK_TOKENS, self.sizes.samples, 2048, draft_rows=rows)
        if self.sizes.policy:
            weights = load_weights(Path(self.sizes.policy), spec, dtype=torch.float32)
        else:
            weights = dict(modules["actor"].named_parameters())
        self.engine = Engine(spec, weights, options, clock=clock)
        self.engine.pause()
        scorer = Scorer(
            {role_named(role): self._frozen(role, modules[role]) for role in ROLES[1:]},
            vocab=self.sizes.vocab,
            temperature=1.0,
            device=self.device.torch_device,
            clock=clock,
        )
        alone = self.groups("generation", self.grid).tp
        sides = tuple((number,) for number in range(self.sizes.instances))
        self.inter_stage = InterStage(
            place=RankPlace(rank, Placement(sides, sides), alone, alone),
            engine=self.engine,
            scorer=scorer,
            store=dist.PrefixStore("inter_stage", dist.distributed_c10d._get_default_store()),
            timeout_seconds=TIMEOUT_SECONDS,
            progress=lambda _: None,
            bucket_bytes=BUCKET_BYTES,
            clock=clock,
        )
        self.iteration, self.history = 0, []

    def _model(self, role: str) -> torch.nn.Module:
        head, seed = role in ("critic", "reward"), self.seed + ROLES.index(role)
        return self.llama(role, self.sizes.spec(role), self.grid, head, seed).requires_grad_(False)

    def _frozen(self, role: str, model: torch.nn.Module) -> FrozenModel:
        weights = OffloadedWeights(model, self.device)
        weights.offload()
        stage = PipelineStage(model, first=True, last=True, scalar_head=role != "reference")
        return FrozenModel(stage, weights, self.groups(role, self.grid).tp)

    def load(self, lengths: SampleLengths, seed: int) -> None:
        """Take a batch: prompts of these lengths, random or begun by the policy; outputs forced to theirs."""
        generator = torch.Generator().manual_seed(seed)

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(FIRST_TOKEN, self.sizes.vocab, (count,), generator=generator).tolist())

        prompts = [tokens(prompt) for prompt in lengths.prompt]
        if self.sizes.policy:
            written = self._write([(1,)] * len(prompts), max(lengths.prompt), seed=2)
            prompts = [tuple(text[: len(prompt)]) for text, prompt in zip(written, prompts)]
            self.history = list(zip(prompts, self._write(prompts, max(lengths.output), seed=3)))
        self.requests = [
            Request(sample, prompt, SamplingParams(max_tokens=output, ignore_eos=True, seed=1))
            for sample, (prompt, output) in enumerate(zip(prompts, lengths.output))
        ]

    def _write(self, prompts: Sequence[tuple[int, ...]], count: int, seed: int) -> list[tuple[int, ...]]:
        """What the actor answers."""
        self.engine.resume()
        params = SamplingParams(max_tokens=count, ignore_eos=True, seed=seed)
        results = self.engine.generate(prompts, params)
        self.engine.pause()
        return [tuple(result.tokens) for result in results]

    def run(self, threshold: int, limits: InstanceLimits) -> dict[str, Any]:
        """Generate and score the batch, from a barrier on; the sums are over all ranks, equal on each."""
        self.engine.resume()
        if self.engine.loop.guesser:  # each run is a first one: it must not remember what it is going to write
            self.engine.loop.guesser = self.engine.new_guesser()
            self.engine.learn(self.history)
        self.iteration += 1
        with together():
            self.inter_stage.clock.forget()
            report = self.inter_stage.run(self.iteration, self.requests, threshold, limits)
        return {
            "total_seconds": report.total_seconds,
            "generation_seconds": report.generation_seconds,
            "spans": [(span.kind, span.start_seconds, span.end_seconds) for span in self.inter_stage.clock.spans],
            "plan": str(report.plan) if report.plan else "",
            "migrated_bytes": report.migrated_bytes,
            "needed_bytes": report.bytes_needed,
            "early": report.scored_before_generation_end,
            "observations": report.observations,
            "agreement_seconds": report.agreement_seconds,
            "digest": digest(report.rollouts),
            "outputs": [len(rollout.response_tokens) for rollout in report.rollouts],
            "turns": report.turns,
        }


def digest(rollouts: Sequence[Rollout]) -> str:
    """SHA-256 of the tokens and of the bits of every number."""
    sha = hashlib.sha256(RolloutBatch.from_rollouts(rollouts).digest().encode())
    for rollout in rollouts:
        for values in (rollout.ref_logprobs, rollout.values, torch.tensor(rollout.score, dtype=torch.float32)):
            assert values is not None, f"sample {rollout.sample_id} was not scored"
            sha.update(values.contiguous().numpy().tobytes())
    return sha.hexdigest()
