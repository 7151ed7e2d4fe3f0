"""Sources of the configuration, the strongest first: flags, CONVEYOR_ENGINE_<SETTING>, a YAML file, the defaults.

Called by `__main__`. Flags and variables are read as in every program (`conveyor_process.settings`); only the engine
has a file. The error for a value that cannot be used names the key and its source.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from conveyor_engine.config.engine_config import EngineConfig, find_conflicts
from conveyor_engine.errors import ConfigError
from conveyor_process.settings import Given, Program, SettingsError

PROGRAM = Program(
    "conveyor_engine",
    "Serves a model over HTTP. Each setting is also a key, in snake_case, of the file that `--config` names.",
    EngineConfig,
    find_conflicts,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and one flag per field. A flag that is absent sets no attribute."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of these settings, in snake_case")
    PROGRAM.add_flags(parser)


def parse_config(flags: Mapping[str, Any], environment: Mapping[str, str]) -> EngineConfig:
    """Return the configuration from all sources. Raises ConfigError (reason InvalidConfig)."""
    path = flags.get("config")
    given = [] if path is None else list(_read_file(Path(path)))
    try:
        return PROGRAM.build([*given, *PROGRAM.from_environment(environment), *PROGRAM.from_flags(flags)])
    except SettingsError as error:
        raise ConfigError(str(error)) from None


def _read_file(path: Path) -> Iterator[Given]:
    try:
        content = yaml.load(path.read_text(), _StrictLoader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path} must hold one mapping of field names to values")
    for name, value in content.items():
        if name == "class_shares" and isinstance(value, dict):
            value = ",".join(f"{key}:{each}" for key, each in value.items())
        if name == "adapters" and isinstance(value, dict) and not any("," in str(each) for each in value.values()):
            value = ",".join(f"{key}={each}" for key, each in value.items())
        if name == "length_grouping" and value is False:  # YAML's `off`
            value = "off"
        yield Given(name, value, f"file {path}", is_text=False)


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that raises an error if a key appears twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} appears twice")
        return super().construct_mapping(node, deep)
