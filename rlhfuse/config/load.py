"""From YAML and dotted `key=value` arguments to a checked RunConfig, and back to YAML.

OmegaConf reads and merges, the models of settings.py validate, rules.py looks at combinations. Every refusal is an
InputError of one line that names the key, its value and what would do.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from yaml import CollectionEndEvent, CollectionStartEvent, SafeLoader, ScalarEvent, YAMLError, parse, safe_load

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import is_listed, read_text
from rlhfuse.base.json_values import DEEPEST, LARGEST
from rlhfuse.config.rules import check_config
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.settings_group import Settings
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO, LARGEST_REAL, OrAuto
from rlhfuse.tasks.role import Role
from rlhfuse.tasks.task import SCORERS

PACKAGE = Path(__file__).resolve().parents[1]
EXAMPLES = (PACKAGE, PACKAGE.parent)  # where examples/ lies when installed, and in a checkout
LONGEST = 200  # characters of what was given that are said again
BOUNDS = ("gt", "ge", "lt", "le")
HUB_FILES = ["*.json", "*.model*", "*.txt", "*.jinja", "*.tiktoken", "*.spm", "*.codes", "LICENSE*"]  # but weights
UNKNOWN = ("extra_forbidden", "invalid_key")
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Literal: "a text"}
KINDS[dict] = "a mapping"
OLD_NUMBER = re.compile(
    r"[-+]?(0[0-7_]+|[1-9][\d_]*(:[0-5]?\d)+|\d[\d_]*(:[0-5]?\d)+\.[\d_]*)", re.ASCII
)  # of base 8, 60
ALL_AUTO = {  # what the word auto for the group `parallel` stands for
    **dict.fromkeys(("actor_train", "critic_train", "generation", "inference", "sequence_parallel"), AUTO),
    **dict.fromkeys(SCORERS, ""),
}
LISTS = {str: ("a list of texts like [a.jsonl, b.jsonl]", "a text"), int: ("a list of ids like [2, 7]", "an id >= 0")}
LISTS |= {float: ("a list of numbers like [1, 0.5]", "a number")}


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, if any, apply `key=value` overrides, fill defaults, check ranges and combinations.

    A file or a path in it that begins with examples/ and is not there is looked for in what is installed.
    Raises InputError naming the file or the argument, the key, and the nearest known key.
    """
    sources = [*([_read(Path(_installed(str(path))))] if path else []), *map(_argument, overrides)]
    try:
        merged = OmegaConf.merge(RunConfig().model_dump(mode="json"), *sources)
        config = validate(_installed(OmegaConf.to_container(merged, resolve=True)), str(path or "the settings"))
    except OmegaConfBaseException as error:
        raise InputError(f"{path}: {getattr(error, 'full_key', '')}: {str(error).splitlines()[0]}") from None
    config = _fill_defaults(config)
    check_config(config)
    return config


def _installed(value: Any) -> Any:
    """`value`, or each text of it, with the project's own example for a path to one that is not in this folder."""
    if isinstance(value, dict):
        return {key: _installed(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_installed(part) for part in value]
    if isinstance(value, str) and value.startswith("examples/") and not os.path.exists(value):
        return next((str(root / value) for root in EXAMPLES if (root / value).exists()), value)
    return value


def dump_config(config: RunConfig) -> str:
    """YAML text that `load_config` reads back to an equal value."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def validate(raw: Any, where: str) -> RunConfig:
    """Nested keys and values as a RunConfig, its defaults not filled. Raises InputError for the first fault."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise InputError(_refusals(error, where)[0][0]) from None


def _fill_defaults(config: RunConfig) -> RunConfig:
    """`config` with the defaults that depend on other keys."""
    paths = {role: [getattr(config, source).path for source in (role, *role.starts_from)] for role in config.roles()}
    groups: dict[str, dict] = {role: {"path": next(filter(None, given), "")} for role, given in paths.items()}
    groups["actor"]["tokenizer"] = config.actor.tokenizer or config.actor.path
    inference = config.parallel.inference or config.parallel.generation
    own = {task: getattr(config.parallel, task) or inference for task in SCORERS}
    for role in config.trained():
        groups[role]["optim"] = {"lr_decay_iterations": _decay_iterations(config, role)}
    kl = {"kl_in": config.algorithm.kl_place, "kl_estimator": config.algorithm.estimator}
    return config.with_(parallel={"inference": inference, **own}, algorithm=kl, **groups)


def _decay_iterations(config: RunConfig, role: Role) -> int:
    """Iteration at which a schedule ends: by default the run's last, so that a longer run that resumes it keeps it."""
    optim = getattr(config, role).optim
    if optim.lr_decay_iterations or (optim.lr_scheduler_type == "constant" and not optim.lr_warmup_ratio):
        return optim.lr_decay_iterations
    return max(1, config.trainer.iterations - config.held_iterations(role))


def _read(file: Path) -> DictConfig:
    text = read_text(file, "give the path of a YAML file")
    _check_nesting(text, f"config file {file}")
    try:
        source = OmegaConf.load(StringIO(text))
    except Exception as error:  # yaml raises many kinds; all of them mean: not YAML
        raise InputError(f"config file {file} is not valid YAML: {shortened(error)}") from None
    if not isinstance(source, DictConfig):
        raise InputError(f"{file}: the file must be a mapping, not {shortened(OmegaConf.to_container(source))}")
    return _check_source(source, str(file))


def _check_nesting(text: str, where: str) -> None:
    """Raise InputError for what no key takes, what the recursion in C below does not survive, and old numbers."""
    depth, deep = 0, text.count("${") > DEEPEST
    with suppress(YAMLError):  # which is said when it is loaded
        for event in parse(text, SafeLoader):
            if isinstance(event, ScalarEvent) and event.implicit[0] and OLD_NUMBER.fullmatch(text := event.value):
                fix = f"write a number without leading zeros and colons, a text as '{text}'"
                raise InputError(f"{where}: YAML reads {text} as {safe_load(text)}; {fix}")
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if deep := deep or depth > DEEPEST:
                break
    if deep:
        raise InputError(f"{where} is nested more than {DEEPEST} deep; no key takes such a value")


def _argument(text: str) -> DictConfig:
    if "=" not in text:
        raise InputError(f"argument {shortened(text)!r} is not of the form key=value")
    _check_nesting(text.partition("=")[2], f"argument {shortened(text)!r}")
    try:
        source = OmegaConf.from_dotlist([text if text.partition("=")[2] else f"{text}''"])  # nothing is the empty text
    except Exception as error:  # of many kinds, as in a file
        raise InputError(f"argument {shortened(text)!r} cannot be read: {shortened(error)}") from None
    return _check_source(source, f"argument {shortened(text)!r}")


def _check_source(source: DictConfig, where: str) -> DictConfig:
    """`source`, `parallel: auto` spelled out. Raises InputError for unknown keys and wrong types; a range is looked at
    after merging."""
    raw = OmegaConf.to_container(source)
    if isinstance(raw, dict) and raw.get("parallel") == AUTO:
        source["parallel"] = ALL_AUTO
    try:
        RunConfig.model_validate(OmegaConf.to_container(source))
    except ValidationError as error:
        for line, mendable in _refusals(error, where):
            if not mendable:
                raise InputError(line) from None
    return source


def _refusals(error: ValidationError, where: str) -> list[tuple[str, bool]]:
    """A line for each fault, unknown keys first, and whether another source may still mend it."""
    faults = error.errors(include_url=False)
    return [_refusal(fault, where) for fault in sorted(faults, key=lambda fault: fault["type"] not in UNKNOWN)]


def _refusal(fault: Mapping[str, Any], where: str) -> tuple[str, bool]:
    key, field = _field_at(fault["loc"])
    value, kind = fault["input"], fault["type"]
    value = shortened(value) if isinstance(value, str) else value
    if kind in UNKNOWN:
        near = difflib.get_close_matches(key, [known for known, _, _ in RunConfig().leaves()], n=1, cutoff=0.0)
        return f"{where}: unknown key {shortened(key)}; did you mean {near[0]}?", False
    if value == "???":
        return f"{where}: {key}='???' must be a value, not OmegaConf's mark of a missing one", False
    if field is None:
        kind = "auto or a mapping" if key == "parallel" else "a mapping"
        return f"{where}: {key} must be {kind}, not {value!r:.{LONGEST + 2}}", "${" in str(value)
    if limits := _limits(field, kind):
        return f"{key}={float(value) if field.annotation is float else value} must be {limits}", True
    if isinstance(reason := fault.get("ctx", {}).get("error"), InputError):
        return f"{key}={str(value)[:LONGEST]}: {reason}", True
    if kind == "literal_error" and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return f"{key}={str(value)!r} must be one of {', '.join(get_args(field.annotation))}", True
    inside = fault["loc"][len(key.split(".")) :]  # of a list
    kind = get_origin(field.annotation) or field.annotation
    element = get_args(get_args(field.annotation)[0])[0] if kind is tuple else kind  # elements are annotated
    expected = LISTS[element][bool(inside)] if kind is tuple else KINDS[kind]
    expected = f"auto or {expected}" if any(isinstance(item, OrAuto) for item in field.metadata) else expected
    key += "".join(f"[{i}]" for i in inside)
    return f"{where}: {key}={value!r:.{LONGEST + 2}} must be {expected}", "${" in str(value)


def shortened(text: object) -> str:
    """One line that fits into a message."""
    return " ".join(str(text)[:LONGEST].split())


def _field_at(location: Sequence[str | int]) -> tuple[str, FieldInfo | None]:
    """Dotted key of a fault, and its definition: None for a group and for a key that is not known."""
    group: Any = RunConfig
    for depth, name in enumerate(location, start=1):
        field = group.model_fields.get(name)
        if field is None or not isinstance(field.default, Settings):
            return ".".join(map(str, location[:depth])), field
        group = field.annotation
    return ".".join(map(str, location)), None


def _limits(field: FieldInfo, fault: str) -> str:
    """The range that a number was refused for, as text; '' for another fault."""
    if fault == "finite_number":
        return "finite"
    if not fault.startswith(("greater_than", "less_than")):
        return ""
    bounds = {name: getattr(item, name) for item in field.metadata for name in BOUNDS if hasattr(item, name)}
    low, high = bounds.get("gt", bounds.get("ge")), bounds.get("lt", bounds.get("le"))
    if high not in (LARGEST, LARGEST_REAL):
        return f"in {'(' if 'gt' in bounds else '['}{low:n}, {high:n}{')' if 'lt' in bounds else ']'}"
    return f"at most {high:n}" if fault.startswith("less") else f"{'above' if 'gt' in bounds else 'at least'} {low:n}"


def read_specs(config: RunConfig) -> dict[Role, ModelSpec]:
    """The model spec of each role, from its folder's config.json. Raises InputError naming file and field."""
    paths = {role: getattr(config, role).path for role in config.roles()}
    return {role: ModelSpec.from_config(model_folder(path, f"{role}.path"), role) for role, path in paths.items()}


def model_folder(name: str, key: str, weights: bool = False) -> Path:
    """Local folder of a path or hub name, set under `key`; of the latter, without `weights`, all but these. Raises
    InputError when there is neither."""
    path = Path(name)
    if path.is_dir():
        return path
    if is_listed(path) or name.startswith((".", "/")) or name.count("/") > 1:
        raise InputError(f"{key}={name} is no folder; give a Hugging Face model folder or hub name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES + ["*.safetensors"] * weights))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{key}={name} is no folder and no hub model that can be fetched: {reason}") from None
