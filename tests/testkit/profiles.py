"""How many examples a test of random cases tries: a fifth of them every day, all of them in CI."""

from hypothesis import settings

FULL, EVERYDAY = "full", "everyday"
settings.register_profile(FULL, derandomize=True, deadline=None, max_examples=100)
settings.register_profile(EVERYDAY, derandomize=True, deadline=None, max_examples=20)
settings.load_profile(FULL)


def share(count: int) -> int:
    """How many of `count` random cases the profile that is loaded asks for."""
    return max(1, count * settings.default.max_examples // 100)  # pyright: ignore[reportOptionalMemberAccess]


def examples(count: int, **more: object) -> settings:
    """The settings of a hypothesis test that wants `count` examples in CI."""
    return settings(max_examples=share(count), **more)  # pyright: ignore[reportArgumentType]
