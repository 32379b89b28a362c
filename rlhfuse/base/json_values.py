"""JSON files as values, read within limits: models that refuse what they do not know, in one line that says where.

Files of this program hold what JSON allows. Those of others may hold NaN where nobody looks. No key has two values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import CHECK, read_lines, read_text

LARGEST = 2**31 - 1  # of whole numbers without a limit of their own: torch and Megatron count in int32 in places
DEEPEST = 100  # lists and objects within each other
MOST_DIGITS = 40  # of a whole number


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
Form = TypeVar("Form", bound="Versioned")


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:MOST_DIGITS]} is no finite number")
    return value


def _one_value_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    for key, value in pairs if len(values) < len(pairs) else ():
        if value != values[key]:
            raise ValueError(f"the key {key!r:.40} is there twice, with {value!r:.40} and {values[key]!r:.40}")
    return values


_OWN = json.JSONDecoder(object_pairs_hook=_one_value_each, parse_int=_whole, parse_float=_real, parse_constant=_real)
_OTHERS = json.JSONDecoder(object_pairs_hook=_one_value_each)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        inner = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, (dict, list)))
        level = [entry for entries in inner for entry in entries]
    if level:
        raise RecursionError


def json_value(text: str, where: str, own: bool = True, fix: str = "") -> Any:
    """The value that a JSON text stands for; `own`: of a file of this program. Raises InputError naming `where`."""
    fix = fix and f"; {fix}"
    try:
        value = (_OWN if own else _OTHERS).decode(text.rstrip())
        if text.count("[") + text.count("{") > DEEPEST:
            _check_depth(value)
    except json.JSONDecodeError as error:
        at = where if error.lineno == 1 else f"{where}:{error.lineno}"  # a file of one value has many lines
        reason = f"{error.msg} at column {error.colno}"
        raise InputError(f"{at}: not valid JSON ({reason}): {text.strip()[:40]!r}{fix}") from None
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON ({error}){fix}") from None
    except RecursionError:
        raise InputError(f"{where}: JSON nested more than {DEEPEST} deep{fix or '; cut it'}") from None
    return value


def read_json(path: str | Path, own: bool = True, fix: str = "") -> Any:
    """The value of a JSON file. Raises InputError naming one that is missing, unreadable or not JSON, and the fix."""
    return json_value(read_text(path, fix or CHECK), str(path), own, fix)


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
    return _parsed(TypeAdapter(kind), fields, where)


def _parsed(adapter: TypeAdapter[Value], fields: Any, where: str) -> Value:
    try:
        return adapter.validate_json(json.dumps(fields, allow_nan=False), strict=True)
    except ValidationError as error:
        raise InputError(f"{where}: {_fault(error.errors(include_url=False)[0])}") from None
    except ValueError:  # of json.dumps
        raise InputError(f"{where}: a number in it is not finite; write it anew") from None


class Versioned:
    """A frozen dataclass that a file holds; `version` of its form is told first, and `kind` where files are alike."""

    version: ClassVar[int]
    kind: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        kind = {"kind": self.kind} if self.kind else {}
        return {"version": self.version, **kind, **to_json(self)}

    @classmethod
    def from_dict(cls: type[Form], raw: Any, where: str = "a file") -> Form:
        """Inverse of `to_dict`. Raises InputError naming `where` and the field."""
        return from_json(cls, raw, where, cls.version)


def read_json_lines(kind: type[Value], path: str | Path) -> list[Value]:
    """All lines of a file as values of `kind`, without the unfinished last one of a killed run.

    Raises InputError naming file and line.
    """
    adapter, fix = TypeAdapter(kind), "remove the line"  # one for all lines: to make it takes longer than to read one
    lines = ((f"{path}:{number}", line) for number, line in read_lines(path, finished=True))
    return [_parsed(adapter, json_value(line, where, own=False, fix=fix), where) for where, line in lines]


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
