"""The samples of a rehearsal: as long as they can become, and all but the last tokens of what is decoded is prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rehearsal.stand_ins.paused import OBSERVED

from rlhfuse.config.settings import RunConfig
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic
from rlhfuse.fusion.inter.request import Request
from rlhfuse.gen.core.sequence import SamplingParams
from rlhfuse.planning.candidate import Candidate
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.run.rank_models import sampling_params
from rlhfuse.tasks.role import POLICY

RESPONSE_STEPS = 3  # decoded of each sample, the last of its tokens
TAIL_STEPS = 12  # of one of the long tail
DIFFERENT_TOKENS = 8
DRAWN = 0  # what is read of a draw that has no value


@dataclass(frozen=True)
class Samples:
    """Those of one run."""

    config: RunConfig
    vocab: int

    @staticmethod
    def of(draft: Candidate) -> Samples:
        return Samples(draft.config, draft.run.specs[POLICY].vocab)

    @property
    def longest(self) -> int:
        return self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens

    def sampling(self, steps: int = RESPONSE_STEPS, pauses: bool = False) -> SamplingParams:
        """Draws of so many tokens; with `pauses` each token that is drawn ends a turn."""
        ends = {"stop": (), "stop_token_ids": (DRAWN,) if pauses else (), "ignore_eos": True, "turns": pauses}
        return replace(sampling_params(self.config), max_tokens=steps, min_tokens=0, **ends)

    def tokens(self, sample: int, count: int) -> tuple[int, ...]:
        """Prompts that differ from their first block on."""
        cycle = [(sample * DIFFERENT_TOKENS + place) % self.vocab for place in range(DIFFERENT_TOKENS)]
        return tuple((cycle * (count // DIFFERENT_TOKENS + 1))[:count])

    def requests(self, ids: Sequence[int], tail: int) -> list[Request]:
        """An instance's: the last `tail` end late, and are like no other; of the others most find their blocks.

        One of these ends when all of the tail have begun; with tools the first one pauses.
        """
        batched = self.config.rollout.max_batched_tokens
        different = max(1, 2 * batched // self.longest)
        begun = RESPONSE_STEPS + 2 * -(-tail * self.longest // batched)
        found = []
        for place, sample in enumerate(ids):
            late = place >= len(ids) - tail
            steps = begun + TAIL_STEPS if late else begun if place == len(ids) - tail - 1 else RESPONSE_STEPS
            pauses = self.config.rollout.multi_turn.enable and place == 0 and not late
            steps += OBSERVED if pauses else 0
            prompt = self.tokens(different + sample if late else place % different, self.longest - steps)
            found.append(Request(sample, prompt, self.sampling(steps, pauses)))
        return found

    def training_batch(self, minibatches: int, batch: BatchArithmetic) -> RolloutBatch:
        """Mini-batches of samples so long that as few as can fill a micro-batch to its last token, and as many as fill
        all of a number of micro-batches that there is."""
        cut, count, length = batch.cut, batch.samples_per_minibatch, self.longest
        if batch.by_tokens:
            each = math.ceil(cut.tokens / self.longest)
            length = int(cut.tokens / each)
            filled = [each * cut.pipelines * rung for rung in cut.rungs]
            count = max((samples for samples in filled if samples <= count), default=count)
        count *= minibatches
        made = RolloutBatch.from_rollouts([self.rollout(number, length=length) for number in range(count)])
        ones = torch.ones(made.response_tokens)  # without an advantage a sample may be left out
        return made.with_fields(advantages=ones, returns=torch.zeros_like(ones))

    def rollout(self, sample: int, scored: bool = True, length: int | None = None) -> Rollout:
        """As it comes out of generation, or of inference; the longest, or of so many tokens."""
        response = self.config.rollout.max_response_tokens
        response -= min(response - 1, self.longest - (length or self.longest))
        prompt = (length or self.longest) - response
        tokens = self.tokens(sample, prompt), self.tokens(sample, response)
        zeros = torch.zeros(response)
        entropies = zeros if self.config.algorithm.top_entropy_quantile < 1 else None
        done = Rollout(sample, *tokens, zeros, "length", entropies=entropies)
        fields = (role.field for role in self.config.scorers()) if scored else ()
        return replace(done, **{field: 0.5 if field == "score" else zeros for field in fields})
