"""Little sums in words from a seeded grammar, with worked solutions in the form of GSM8K.

    Tom has 3 boxes of 4 apples. Ann gives him 5 more. How many apples does Tom have now?
    3*4=12
    12+5=17
    #### 17

A sum has one or two steps. The embedded model sees worked solutions and, more often, mere guesses: it can do sums, and
seldom takes the trouble.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LARGEST_NUMBER = 10  # in a question; of factors FACTORS
FACTORS = (2, 3, 4, 5), (2, 3, 4, 5, 6)
FARTHEST_GUESS = 5
PRODUCT_SHARE, TWO_STEP_SHARE = 0.25, 0.5

PEOPLE = (  # name, subject, object
    *((name, "she", "her") for name in ("Ann", "Lily", "Mia", "Rosa", "Zoe", "Ella", "Nina", "Clara")),
    *((name, "he", "him") for name in ("Tom", "Ben", "Max", "Sam", "Leo", "Finn", "Jack", "Hugo")),
)
THINGS = ("apples", "books", "cards", "coins", "eggs", "kites", "nuts", "pears", "pens", "shells", "stamps", "toys")
BOXES = ("bags", "baskets", "boxes", "bowls")
MORE = (
    "{friend} gives {him} {number} more.",
    "{who} finds {number} more.",
    "{who} buys {number} more.",
    "Then {who} gets {number} more from {friend}.",
)
LESS = (
    "{who} gives {number} to {friend}.",
    "{who} loses {number}.",
    "{who} sells {number}.",
    "Then {friend} takes {number} of them.",
)
QUESTIONS = (
    "How many {things} does {name} have now?",
    "How many {things} has {name}?",
    "How many {things} does {who} have?",
)


@dataclass(frozen=True)
class Sum:
    """A question, and how it is worked out: from `first` on, one (sign, number) after the other."""

    question: str
    first: int
    steps: tuple[tuple[str, int], ...]

    def solution(self) -> str:
        """Worked line by line."""
        lines, value = [], self.first
        for sign, number in self.steps:
            result = _work_out(value, sign, number)
            lines.append(f"{value}{sign}{number}={result}")
            value = result
        return "\n".join([*lines, f"#### {value}"])

    def guess(self, rng: random.Random) -> str:
        """An answer without working: any number near the right one, sometimes that itself."""
        right = int(self.solution().split()[-1])
        return f"#### {rng.randint(max(0, right - FARTHEST_GUESS), right + FARTHEST_GUESS)}"


def draw_sum(rng: random.Random) -> Sum:
    """A sum whose results all lie above 0."""
    name, subject, whom = rng.choice(PEOPLE)
    friend = rng.choice([other for other, *_ in PEOPLE if other != name])
    things = rng.choice(THINGS)
    steps: list[tuple[str, int]] = []
    count = 2 if rng.random() < TWO_STEP_SHARE else 1
    if rng.random() < PRODUCT_SHARE:
        first, each = map(rng.choice, FACTORS)
        sentences = [f"{name} has {first} {rng.choice(BOXES)} of {each} {things}."]
        steps.append(("*", each))
        value = first * each
    else:
        first = value = rng.randint(2, LARGEST_NUMBER)
        sentences = [f"{name} has {first} {things}."]
    while len(steps) < count:
        sign = "-" if value > 2 and rng.random() < 0.5 else "+"
        number = rng.randint(1, LARGEST_NUMBER if sign == "+" else min(value - 1, LARGEST_NUMBER))
        text = rng.choice(MORE if sign == "+" else LESS).format(
            who=subject if rng.random() < 0.5 else name, him=whom, friend=friend, number=number
        )
        sentences.append(text[0].upper() + text[1:])
        steps.append((sign, number))
        value = _work_out(value, sign, number)
    sentences.append(rng.choice(QUESTIONS).format(things=things, name=name, who=subject))
    return Sum(" ".join(sentences), first, tuple(steps))


def draw_different(rng: random.Random, count: int) -> list[Sum]:
    """`count` sums, no question twice."""
    drawn: dict[str, Sum] = {}  # a dict keeps the order of drawing
    while len(drawn) < count:
        one = draw_sum(rng)
        drawn[one.question] = one
    return list(drawn.values())


def _work_out(value: int, sign: str, number: int) -> int:
    return {"+": value + number, "-": value - number, "*": value * number}[sign]
