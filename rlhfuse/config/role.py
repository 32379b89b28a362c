"""The models of a run by the part that each plays in it."""

from __future__ import annotations

from enum import Enum


class Role(str, Enum):
    """One of the four models of RLHF. Equal to its name, which is a key of the configuration and of files."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"

    __str__ = str.__str__
    __format__ = str.__format__

    @property
    def scalar_head(self) -> bool:
        """One number per token comes out of it, not logits."""
        return self in (Role.CRITIC, Role.REWARD)

    @property
    def fresh_head(self) -> bool:
        """Its scalar head begins at zero where the checkpoint has none."""
        return self is Role.CRITIC

    @property
    def trains(self) -> bool:
        return self in (Role.ACTOR, Role.CRITIC)

    @property
    def path_defaults(self) -> tuple[Role, ...]:
        """Roles whose checkpoint it takes when it is given none: the first that has one."""
        return {Role.CRITIC: (Role.REWARD, Role.ACTOR), Role.REFERENCE: (Role.ACTOR,)}.get(self, ())


SCORING_ORDER = (Role.REFERENCE, Role.CRITIC, Role.REWARD)
