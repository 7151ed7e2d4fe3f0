"""Where configuration comes from: flags, then CONVEYOR_ENGINE_<FIELD>, then a flat YAML file, then the defaults.

Called by `__main__`. An unknown key and a value that does not fit are refused with a sentence that names the key
and where it came from. Knows every field only through EngineConfig's annotations.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from conveyor_engine.config.engine_config import EngineConfig, limits_broken
from conveyor_engine.errors import ConfigError

ENVIRONMENT_PREFIX = "CONVEYOR_ENGINE_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of EngineConfig, as the sources and the documentation see it."""

    name: str
    kind: type  # str, int, float or bool
    choices: tuple[str, ...]  # of a Literal; else empty
    nullable: bool
    default: object  # dataclasses.MISSING when the field must be given
    doc: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


def settings() -> Iterator[Setting]:
    """Every field of EngineConfig, in order."""
    hints = get_type_hints(EngineConfig, include_extras=True)
    for field in fields(EngineConfig):
        annotated, doc = get_args(hints[field.name])
        options = [annotated] if get_origin(annotated) is Literal else list(get_args(annotated)) or [annotated]
        kind = next(option for option in options if option is not NoneType)
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        yield Setting(field.name, str if choices else kind, choices, NoneType in options, field.default, doc)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`--config` and one flag per field; absent flags leave no attribute behind."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of these fields in snake_case")
    for setting in settings():
        values = "|".join(setting.choices) or ("true|false" if setting.kind is bool else setting.kind.__name__.upper())
        parser.add_argument(setting.flag, metavar=values, default=argparse.SUPPRESS, help=setting.doc)


def parse_config(flags: Mapping[str, Any], environment: Mapping[str, str]) -> EngineConfig:
    """The configuration that these sources together mean. Raises ConfigError (reason InvalidConfig)."""
    known = {setting.name: setting for setting in settings()}
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for name, raw, origin in _given(known, flags, environment):
        if name not in known:
            raise ConfigError(f"{origin}: unknown key {name!r}; known are {', '.join(known)}")
        values[name], origins[name] = _parse_value(known[name], raw, origin), origin
    if "model" not in values:
        raise ConfigError("model is missing: give --model, CONVEYOR_ENGINE_MODEL or `model:` in the file")
    config = EngineConfig(**values)  # type: ignore[arg-type]
    for name, sentence in limits_broken(config):
        raise ConfigError(f"{origins.get(name, 'default')}: `{name}` {sentence}")
    return config


def _given(
    known: Mapping[str, Setting], flags: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[tuple[str, object, str]]:
    """(field, value, where it came from), the strongest source last."""
    path = flags.get("config")
    if path is not None:
        for name, raw in _read_file(Path(path)).items():
            yield name, raw, f"file {path}"
    for variable, raw in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            yield variable.removeprefix(ENVIRONMENT_PREFIX).lower(), raw, f"environment variable {variable}"
    for name in known:
        if name in flags:
            yield name, flags[name], f"flag {known[name].flag}"


def _read_file(path: Path) -> dict[str, object]:
    try:
        content = yaml.load(path.read_text(), _StrictLoader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path} must hold one flat mapping of field names to values")
    return content


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error, not a surprise."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} stands there twice")
        return super().construct_mapping(node, deep)


def _parse_value(setting: Setting, raw: object, origin: str) -> object:
    """Text (flags, environment) is read as the field's type; a YAML value must have it already."""
    if raw is None or (raw == "null" and setting.kind is not str):
        if setting.nullable:
            return None
        raise ConfigError(f"{origin}: `{setting.name}` cannot be null")
    wrong = ConfigError(f"{origin}: `{setting.name}` must be {_expected(setting)}, not {raw!r}")
    if setting.kind is str:
        if not isinstance(raw, str) or (setting.choices and raw not in setting.choices):
            raise wrong
        return raw
    value = _read_text(setting.kind, raw) if isinstance(raw, str) and not origin.startswith("file ") else raw
    if setting.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not setting.kind or (isinstance(value, float) and not math.isfinite(value)):
        raise wrong
    return value


def _read_text(kind: type, text: str) -> object:
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower())
    try:
        return kind(text)
    except ValueError:
        return None


def _expected(setting: Setting) -> str:
    if setting.choices:
        return "one of " + ", ".join(setting.choices)
    return {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}[setting.kind]
