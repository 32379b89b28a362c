"""The models of a run by the part that each plays in it, as a table."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PlainSerializer, PlainValidator


class Role(str):
    """One model of a run. Equal to its name, which is a key of the configuration and of files.

    `loss`: what it trains on (fusion/intra/training_step.py), empty where it is frozen. `starts_from`: roles whose
    checkpoint it takes where it has no path, the first that has one.
    """

    output: Literal["logprobs", "value", "score"]  # of a token, of a token, of a sample
    loss: str
    starts_from: tuple[str, ...]

    def __new__(
        cls, name: str, output: Literal["logprobs", "value", "score"], loss: str = "", starts_from: tuple[str, ...] = ()
    ) -> Role:
        role = super().__new__(cls, name)
        role.output, role.loss, role.starts_from = output, loss, starts_from
        return role

    def __getnewargs__(self) -> tuple:
        """What a copy is made of, in another process too."""
        return str(self), self.output, self.loss, self.starts_from

    @property
    def field(self) -> str:
        """What it fills of a rollout (ppo/rollout.py); models that fill the same are added up."""
        return {"logprobs": "ref_logprobs", "value": "values", "score": "score"}[self.output]

    @property
    def scalar_head(self) -> bool:
        """One number per token comes out of it, not logits."""
        return self.output != "logprobs"

    @property
    def trains(self) -> bool:
        return bool(self.loss)

    @property
    def fresh_head(self) -> bool:
        """Its scalar head begins at zero where the checkpoint has none."""
        return self.scalar_head and self.trains


# The first generates; all others score finished samples, in this order.
ROLES = (
    Role("actor", "logprobs", loss="policy"),
    Role("reference", "logprobs", starts_from=("actor",)),
    Role("critic", "value", loss="value", starts_from=("reward", "actor")),
    Role("reward", "score"),
)
POLICY = ROLES[0]  # its tokenizer and vocabulary are the run's
LEARNERS = tuple(role for role in ROLES if role.trains)


def role_named(name: str) -> Role:
    """The role of this name in `ROLES`."""
    return ROLES[ROLES.index(name)]


RoleName = Annotated[Role, PlainValidator(role_named), PlainSerializer(str)]  # in JSON
