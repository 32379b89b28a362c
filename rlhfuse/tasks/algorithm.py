"""The algorithms, as a table of names and flags; ppo/advantage.py has the functions that are named here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal["ppo", "grpo", "rloo", "reinforce++", "reinforce_plus_plus_baseline"]


@dataclass(frozen=True)
class Algorithm:
    """What an algorithm is made of; settings of the same meaning that are auto follow it."""

    advantage: str  # name of a function in ADVANTAGES
    roles: tuple[str, ...] = ()  # that it needs, and others leave out
    compares: bool = False  # a sample with the others of its prompt
    whitens: bool = True  # advantages, over the whole batch
    kl_in: Literal["reward", "loss"] = "reward"


# In a group's rewards a KL would decide where all scores of a prompt are equal.
ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm("gae", roles=("critic",)),
    "grpo": Algorithm("group_normalised", compares=True, whitens=False, kl_in="loss"),
    "rloo": Algorithm("leave_one_out", compares=True, whitens=False),
    "reinforce++": Algorithm("rewards_to_go"),
    "reinforce_plus_plus_baseline": Algorithm("group_centred", compares=True, kl_in="loss"),
}
