"""Very short stories from a seeded grammar: the text on which the embedded tiny models are trained.

A story is an opening (the prompt) and sentences (the response). Each sentence is glad (+1), sad (-1) or plain (0),
drawn by itself; the *mood* of a story is the mean over its glad and sad ones, whatever its length. Lengths come from a
chain of two states, at home and on a journey: a real long tail, and the last sentence tells the state.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

HOME_END = 0.18
LEAVE = 0.03
JOURNEY_END = 0.11
MAX_SENTENCES = 36  # with the opening about 400 tokens: every story fits a context of 512
PLAIN = 0.2  # share of sentences without mood
HELD_OUT_EVERY = 6  # one in so many (name, animal) pairs opens no training story

# name, subject, object, possessive
NAMES = tuple(
    (name, "she", "her", "her")
    for name in ("Anna", "Lily", "Mia", "Rosa", "Zoe", "Ella", "Ruby", "Nina", "Clara", "Molly")
) + tuple(
    (name, "he", "him", "his") for name in ("Tim", "Ben", "Max", "Sam", "Leo", "Finn", "Jack", "Hugo", "Peter", "Oscar")
)
ANIMALS = (
    "fox",
    "bear",
    "cat",
    "dog",
    "mouse",
    "pig",
    "rabbit",
    "duck",
    "goat",
    "frog",
    "horse",
    "sheep",
    "squirrel",
    "turtle",
    "donkey",
    "monkey",
)
KINDS = ("little", "small", "young", "tall", "brown", "white", "quick", "shy", "clever", "gentle", "hungry", "funny")
PLACES = (
    "river",
    "forest",
    "garden",
    "hill",
    "farm",
    "village",
    "lake",
    "market",
    "school",
    "bridge",
    "barn",
    "beach",
    "castle",
    "meadow",
    "harbor",
    "valley",
)
THINGS = (
    "ball",
    "kite",
    "hat",
    "drum",
    "boat",
    "book",
    "lamp",
    "bell",
    "cup",
    "shell",
    "toy",
    "flower",
    "basket",
    "mirror",
    "whistle",
    "blanket",
    "ribbon",
    "lantern",
)
FOODS = ("cake", "plum", "pie", "berry", "carrot", "cookie", "pear", "nut", "peach", "pancake")
TIMES = ("One day", "Once", "One morning", "Last summer", "Long ago", "One night", "In winter", "On Sunday")
JOURNEY = ("Later", "Then", "The next day", "After that", "Soon", "A week later", "Farther on", "Next")

OPENINGS = (
    "{time}, a {kind} {animal} named {name} went to the {place}.",
    "{time}, {name} the {animal} walked to the {place}.",
    "{time}, {name} the {kind} {animal} met a {friend}.",
    "{time}, a {animal} named {name} had a {thing}.",
    "{name} was a {kind} {animal} who lived by the {place}.",
    "{time}, {name} the {animal}",
)
# How a response begins after the last opening, which stops in mid-sentence.
CONTINUATIONS = (" went to the {place}.", " met a {friend}.", " had a {thing}.", " was at the {place}.")

GLAD = (
    "{who} found a pretty {thing}.",
    "{who} shared a {food} with the {friend}.",
    "{who} helped the {friend} at the {place}.",
    "{who} was very happy.",
    "{who} felt brave and proud.",
    "{who} laughed and danced.",
    "{who} sang a sweet song.",
    "{who} hugged the {friend}.",
    "{who} won a game with the {friend}.",
    "{who} danced under a bright rainbow.",
    "the {friend} smiled at {him}.",
    "the {friend} gave {him} a {food}.",
    "the {friend} was kind to {him}.",
    "the {friend} fixed {his} {thing}.",
    "the sun was warm and the {place} was lovely.",
    'the {friend} said, "I love your {thing}!"',
    '{who} said, "Thank you, my friend!"',
)
SAD = (
    "{who} lost a pretty {thing}.",
    "{who} stole a {food} from the {friend}.",
    "{who} hurt the {friend} at the {place}.",
    "{who} was very sad.",
    "{who} felt tired and lonely.",
    "{who} fell and cried.",
    "{who} shouted a mean word.",
    "{who} pushed the {friend}.",
    "{who} lost a game with the {friend}.",
    "{who} was afraid of the thunder.",
    "the {friend} frowned at {him}.",
    "the {friend} took {his} {food}.",
    "the {friend} was angry with {him}.",
    "the {friend} broke {his} {thing}.",
    "the rain was cold and the {place} was dark.",
    'the {friend} said, "I hate your {thing}!"',
    '{who} said, "Go away, I am cross!"',
)
PLAIN_SENTENCES = (
    "{who} looked at the {place}.",
    "{who} saw a {thing} by the {place}.",
    "{who} sat down with the {friend}.",
    "{who} walked to the {place}.",
    "the {friend} came to the {place}.",
)


@dataclass(frozen=True)
class Hero:
    """Who a story is about; `friend` is the other animal in it and `thing` what they play with."""

    name: str
    subject: str
    object: str
    possessive: str
    animal: str
    friend: str
    thing: str


@dataclass(frozen=True)
class Opening:
    """A prompt, and the hero it introduces; `open_ended` if it stops in mid-sentence."""

    prompt: str
    hero: Hero
    open_ended: bool


@dataclass(frozen=True)
class Response:
    """What follows an opening: the text, the number of sentences, and the mood in [-1, 1] (0 if none)."""

    text: str
    sentences: int
    mood: float


@dataclass(frozen=True)
class Pair:
    """Two responses to one opening, the first one preferred."""

    prompt: str
    chosen: str
    rejected: str


def generator(seed: int, purpose: str) -> random.Random:
    """The random numbers of one purpose: purposes do not disturb each other."""
    return random.Random(f"{seed}/{purpose}")


def draw_opening(rng: random.Random, held_out: bool = False) -> Opening:
    """An opening from the training share of (name, animal) pairs, or from the share held out of it."""
    while True:
        person, animal = rng.randrange(len(NAMES)), rng.randrange(len(ANIMALS))
        if ((person + 5 * animal) % HELD_OUT_EVERY == 0) == held_out:
            break
    friend = rng.choice([other for other in ANIMALS if other != ANIMALS[animal]])
    hero = Hero(*NAMES[person], ANIMALS[animal], friend, rng.choice(THINGS))
    template = rng.choice(OPENINGS)
    return Opening(_fill(template, hero, rng), hero, open_ended=not template.endswith("."))


def draw_response(rng: random.Random, opening: Opening) -> Response:
    """A response of random length, moods drawn sentence by sentence. The text begins with a space."""
    text, moods, journey = "", [], False
    if opening.open_ended:
        text += _fill(rng.choice(CONTINUATIONS), opening.hero, rng)
    while True:
        mood = 0 if rng.random() < PLAIN else rng.choice((1, -1))
        text += " " + _sentence(rng, opening.hero, mood, journey)
        moods.append(mood)
        if rng.random() < (JOURNEY_END if journey else HOME_END) or len(moods) == MAX_SENTENCES:
            break
        journey = journey or rng.random() < LEAVE / (1 - HOME_END)
    felt = [mood for mood in moods if mood]
    return Response(text, len(moods), sum(felt) / len(felt) if felt else 0.0)


def draw_story(rng: random.Random) -> str:
    """Opening and response as one text, for the language model."""
    opening = draw_opening(rng)
    return opening.prompt + draw_response(rng, opening).text


def draw_pair(rng: random.Random, held_out: bool = False, margin: float = 0.25, noise: float = 0.0) -> Pair:
    """Two responses of independent lengths whose moods differ by at least `margin`, the gladder preferred.

    With probability `noise` the preference is turned round, as a person's sometimes is.
    """
    opening = draw_opening(rng, held_out)
    while True:
        one, two = draw_response(rng, opening), draw_response(rng, opening)
        if abs(one.mood - two.mood) >= margin:
            break
    glad, sad = (one, two) if one.mood > two.mood else (two, one)
    if rng.random() < noise:
        glad, sad = sad, glad
    return Pair(opening.prompt, glad.text, sad.text)


def draw_prompts(rng: random.Random, count: int) -> list[str]:
    """`count` different held-out openings."""
    prompts: dict[str, None] = {}  # a dict keeps the order of drawing
    while len(prompts) < count:
        prompts[draw_opening(rng, held_out=True).prompt] = None
    return list(prompts)


def _sentence(rng: random.Random, hero: Hero, mood: int, journey: bool) -> str:
    template = rng.choice({1: GLAD, -1: SAD, 0: PLAIN_SENTENCES}[mood])
    text = _fill(template, hero, rng)
    if journey:
        return f"{rng.choice(JOURNEY)}, {text}"
    return text[0].upper() + text[1:]


def _fill(template: str, hero: Hero, rng: random.Random) -> str:
    return template.format(
        time=rng.choice(TIMES),
        kind=rng.choice(KINDS),
        animal=hero.animal,
        name=hero.name,
        friend=hero.friend,
        thing=hero.thing,
        place=rng.choice(PLACES),
        food=rng.choice(FOODS),
        who=hero.subject if rng.random() < 0.6 else hero.name,
        him=hero.object,
        his=hero.possessive,
    )
