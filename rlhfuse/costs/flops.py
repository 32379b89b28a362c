"""Model FLOPs: what the mathematics of an iteration needs, however it was carried out.

Utilisation (MFU) is these FLOPs over the seconds that they took, the ranks, and what one rank could do at its peak
(PaLM, appendix B).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfuse.config.spec import ModelSpec
from rlhfuse.tasks.role import POLICY, Role

TRAINING_FORWARDS = 3  # forward, gradients of inputs, gradients of weights
Lengths = tuple[int, int]  # tokens of a sample's prompt and response


def forward_flops(spec: ModelSpec, lengths: Sequence[int], outputs: int, scalar_head: bool = False) -> float:
    """FLOPs of whole sequences of `lengths` tokens, `outputs` of which go through the output layer.

    2 N tokens + 2 H outputs + layers x 4 heads head_dim x sum of L (L + 1) / 2, with N the parameters of layers and
    final norm, H those of the output layer; the last term is attention under the causal mask.
    """
    body = spec.layers * spec.layer_parameters + spec.hidden
    head = spec.hidden * (1 if scalar_head else spec.vocab)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    attention = spec.layers * 4 * spec.heads * spec.head_dim * pairs
    return 2 * body * sum(lengths) + 2 * head * outputs + attention


@dataclass(frozen=True)
class IterationFlops:
    """FLOPs of one iteration, all ranks together; `training` is by role."""

    generation: float
    inference: float
    training: Mapping[str, float]

    @property
    def total(self) -> float:
        return self.generation + self.inference + sum(self.training.values())

    @staticmethod
    def of(
        specs: Mapping[Role, ModelSpec],
        trained: Sequence[Role],
        scorers: Sequence[Role],
        samples: Sequence[Lengths],
        passes: Sequence[Lengths],
    ) -> IterationFlops:
        """`samples`: tokens of each one's prompt and response; `passes`: the same of what training ran, a sample as
        often as it did. `specs` has the actor and all of `trained` and `scorers`.

        Generation counts every sample by itself: its prompt and all but the last of its response tokens are read, and
        each response token is an output. Scoring and training read whole samples, with the same outputs.
        """

        def forward(role: Role, lengths: Sequence[Lengths]) -> float:
            outputs = sum(output for _, output in lengths)
            return forward_flops(specs[role], list(map(sum, lengths)), outputs, scalar_head=role.scalar_head)

        read = [sum(lengths) - 1 for lengths in samples]
        return IterationFlops(
            forward_flops(specs[POLICY], read, sum(output for _, output in samples)),
            sum(forward(role, samples) for role in scorers),
            {role: TRAINING_FORWARDS * forward(role, passes) for role in trained},
        )
