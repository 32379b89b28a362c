"""JSON files as values: models that refuse what they do not know, with one line that says where and what must be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

from rlhfuse.base.errors import InputError


class JsonModel(BaseModel):
    """The JSON form of a value: no key that it does not know, no type taken for another, no infinite number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _check_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _check_numbers(value: Any) -> Any:
    return [_check_number(entry) for entry in value] if isinstance(value, list) else _check_number(value)


JsonNumber = Annotated[Any, AfterValidator(_check_number)]  # what is an int stays one
JsonNumbers = Annotated[Any, AfterValidator(_check_numbers)]  # a number or a list of them
Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")


def read_json(path: str | Path) -> Any:
    """Parse a JSON file. Raises InputError naming a file that is missing, unreadable or not JSON."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None


def parse_json(model: type[Model], raw: Any, where: str) -> Model:
    """Parsed JSON as `model`. Raises InputError with `where`, the key, its value and what it must be."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{where}: {_fault(error.errors(include_url=False)[0])}") from None


def to_json(value: Any, version: int | None = None) -> Any:
    """A frozen dataclass as JSON values; `version` is its first key, if it has one."""
    values = TypeAdapter(type(value)).dump_python(value, mode="json", warnings="error")
    return values if version is None else {"version": version, **values}


def from_json(kind: type[Value], raw: Any, where: str, version: int | None = None) -> Value:
    """Inverse of `to_json`, types checked. Raises InputError as `parse_json` does, and for another version."""
    fields = raw
    if version is not None and isinstance(raw, dict):
        if raw.get("version") != version:
            raise InputError(f"{where}: version {raw.get('version')!r} is unknown; this program reads {version}")
        fields = {key: value for key, value in raw.items() if key != "version"}
    try:
        return TypeAdapter(kind).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        raise InputError(f"{where}: {_fault(error.errors(include_url=False)[0])}") from None


def _path(location: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _fault(fault: Mapping[str, Any]) -> str:
    key = _path(fault["loc"])
    if fault["type"] in ("model_type", "dataclass_type"):
        return f"{key} must be a JSON object, not {type(fault['input']).__name__}".strip()
    if fault["type"] == "missing":
        return f"{key} is missing; add it"
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{_path(fault['loc'][:-1])}: unknown key {fault['loc'][-1]!r}; remove it".removeprefix(": ")
    if isinstance(reason := fault.get("ctx", {}).get("error"), InputError):
        return f"{key}: {reason}" if key else str(reason)
    must = fault["msg"].removeprefix("Value error, ").replace("Input should", "must")
    return f"{key} is {json.dumps(fault['input'], default=str)[:200]}; {must[0].lower()}{must[1:]}"
