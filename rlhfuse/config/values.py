"""Types of the values that a key of the configuration may have: their range, and how YAML spells them."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import LARGEST
from rlhfuse.base.parallel_layout import ParallelLayout

LARGEST_REAL = 3e38  # what is larger is infinite in float32
AUTO = "auto"
LONGEST_NAME, LONGEST_PATH = 255, 4000  # bytes, of what Linux opens
DURATION = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,6})h)?(?:(\d{1,8})m)?(?:(\d{1,10})s)?")
LONGEST_SECONDS = 1e7  # of a wait, 115 days: libraries count it in milliseconds


def _refuse(*kinds: type) -> BeforeValidator:
    """For values of types that pydantic would convert: YAML gives them where another key was meant."""

    def check(value: Any) -> Any:
        if type(value) in kinds:
            raise ValueError("of another type")
        return value

    return BeforeValidator(check)


def _not_missing(text: str) -> str:
    if text == "???":
        raise ValueError("OmegaConf's mark of a missing value")
    return text


def _possible_path(text: str) -> str:
    if "\0" in text or any(len(name.encode(errors="surrogatepass")) > LONGEST_NAME for name in text.split("/")):
        raise InputError(
            f"a name in it is longer than {LONGEST_NAME} bytes or has a zero byte; no file has such a name"
        )
    if len(text.encode(errors="replace")) > LONGEST_PATH or any("\ud800" <= sign <= "\udfff" for sign in text):
        raise InputError(f"it is longer than {LONGEST_PATH} bytes or no text of UTF-8; no file has such a name")
    return text


def _not_negative(token: int) -> int:
    if token < 0:
        raise ValueError("below 0")
    return token


def seconds_of(duration: str) -> float:
    """Seconds of a Duration, infinite for an empty one. Raises InputError."""
    if not duration:
        return math.inf
    counts = found.groups("0") if (found := DURATION.fullmatch(duration)) else ()
    seconds = sum(int(count) * unit for count, unit in zip(counts, (86400, 3600, 60, 1), strict=False))
    if not 0 < seconds <= LONGEST_SECONDS:
        raise InputError("give days, hours, minutes and seconds above 0 as in 1d12h, 3h50m or 90s, or empty for none")
    return seconds


def _check_layout(text: str) -> str:
    if text != AUTO:
        ParallelLayout.parse(text)
    return text


def _auto_or(value: Any, other: ValidatorFunctionWrapHandler) -> Any:
    return value if value == AUTO else other(value)


class OrAuto:
    """Lets a number or truth be AUTO, too: until device, layouts and prompts are known, when it gets a value."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        as_it_is = core_schema.plain_serializer_function_ser_schema(lambda value: value)
        return core_schema.no_info_wrap_validator_function(_auto_or, handler(source), serialization=as_it_is)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"const": AUTO}, handler(schema["schema"])]}


def known(value: Any, resolved: Any) -> Any:
    """A key's value, or what was found for one that is AUTO."""
    return resolved if value == AUTO else value


def _truth_as_text(value: Any) -> Any:
    return str(value).lower() if isinstance(value, (bool, str)) else value


def _truth_as_rule(value: Any) -> Any:
    text = _truth_as_text(value)
    return {"true": "search", "false": "serial"}.get(text, text) if isinstance(text, str) else value


_WHOLE, _REAL = _refuse(bool, float), _refuse(bool)
Truth = Annotated[bool, _refuse(int, float)]
Whole = Annotated[int, _WHOLE]
Count = Annotated[int, Field(ge=0, le=LARGEST), _WHOLE]
Positive = Annotated[int, Field(ge=1, le=LARGEST), _WHOLE]
PositiveOrAuto = Annotated[Positive, OrAuto()]
CountOrAuto = Annotated[Count, OrAuto()]
TruthOrAuto = Annotated[Truth, OrAuto()]
Processes = Annotated[int, Field(ge=1, le=1024), _WHOLE]
Float = Annotated[float, _REAL]
Real = Annotated[float, Field(ge=-LARGEST_REAL, le=LARGEST_REAL), _REAL]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST_REAL), _REAL]
Share = Annotated[float, Field(ge=0, le=1), _REAL]
Decay = Annotated[float, Field(ge=0, lt=1), _REAL]
Wait = Annotated[float, Field(gt=0, le=LONGEST_SECONDS), _REAL]
Text = Annotated[str, AfterValidator(_not_missing)]
Duration = Annotated[Text, AfterValidator(lambda text: seconds_of(text) and text)]
PathText = Annotated[Text, AfterValidator(_possible_path)]  # a file or folder, or a name that may not be one
Functions = Annotated[  # one may stand without brackets
    tuple[Annotated[PathText, Field(strict=True)], ...],
    BeforeValidator(lambda given: [*filter(None, [given])] if isinstance(given, str) else given),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
ModelPath = Annotated[PathText, Field(strict=True)]  # not even a number, as nan is one of YAML's
Name = Annotated[Text, Field(strict=True)]  # not even a number
TokenId = Annotated[int, _WHOLE, AfterValidator(_not_negative)]
Layout = Annotated[str, AfterValidator(_check_layout)]  # or AUTO, until planning/search has chosen one
LayoutOrDefault = Annotated[str, AfterValidator(lambda text: text and _check_layout(text))]
Recompute = Literal["none", "selective", "full"]  # what of training's forwards is run again for their backwards
AutoOrTruth = Annotated[  # texts that YAML may give as true and false
    Literal["auto", "true", "false"],
    BeforeValidator(_truth_as_text),
    Field(json_schema_extra={"enum": ["auto", "true", "false", True, False]}),
]
TrainingOrder = Annotated[  # a truth says whether the models are fused
    Literal["search", "interleaved", "time_sharing", "serial"],
    BeforeValidator(_truth_as_rule),
    Field(json_schema_extra={"enum": ["search", "interleaved", "time_sharing", "serial", True, False]}),
]
