"""A group of settings as a frozen model, of which a configuration is made, and the keys in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Model = TypeVar("Model", bound="Settings")


def key(default: Any, help: str, **limits: Any) -> Any:
    """A key of the configuration; `limits`: ge, gt, le, lt."""
    return Field(default, description=help, **limits)


class Settings(BaseModel):
    """A group of keys. Raises pydantic.ValidationError for a value that is not in the range of its key."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)

    def with_(self: Model, **changes: Any) -> Model:
        """This group with other values, validated; a dict stands for changes within a group below it."""
        groups = {name: new for name, new in changes.items() if isinstance(getattr(self, name, None), Settings)}
        below = {name: getattr(self, name).with_(**new) for name, new in groups.items() if isinstance(new, dict)}
        return type(self)(**{**dict(self), **changes, **below})

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
        """Dotted key, value and definition of every key of this group and those below."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Settings):
                yield from value.leaves(f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value, field
