"""Reads settings from flags, environment variables and files, for all programs.

Each program has a frozen dataclass whose fields come from `setting`, and a `Program` for it. Field `admin_port` of
`conveyor_gateway` is the flag `--admin-port` and the variable CONVEYOR_GATEWAY_ADMIN_PORT. `__main__` reads the
settings once. `docs/configuration.py` writes its tables from the same fields. A setting's kind defines the allowed
values (`kinds`).
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")


class SettingsError(Exception):
    """A value is invalid. The message begins with the value's origin."""


@dataclass(frozen=True, slots=True)
class ValueKind(Generic[T]):
    """A kind of setting: its description and its parser. `parse` raises ValueError with the invalid part."""

    must_be: str
    parse: Callable[[str], T]
    is_text: bool = True  # whether files contain it as a string, not as a number or a boolean
    is_nullable: bool = False


def optional(kind: ValueKind[T]) -> ValueKind[T | None]:
    """Return a kind that also allows `null`: in a file, and as a flag or variable unless the kind is text."""
    return ValueKind(kind.must_be, kind.parse, kind.is_text, is_nullable=True)


def setting(default: T, meaning: str, kind: ValueKind[T]) -> T:
    """Declare a field of a dataclass of settings. To type checkers it looks like the default."""
    return field(default=default, metadata={"meaning": meaning, "kind": kind})


def required(meaning: str, kind: ValueKind[T]) -> T:
    """Declare a field without a default."""
    made: T = field(metadata={"meaning": meaning, "kind": kind})
    return made


@dataclass(frozen=True, slots=True)
class Given:
    """A value and its origin. `is_text`: whether it comes from a flag or a variable, not from a file with types."""

    name: str
    value: object
    origin: str
    is_text: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table of settings in the documentation."""

    flag: str
    variable: str
    must_be: str
    default: str
    meaning: str


def _no_conflicts(_: object) -> Iterable[tuple[str, str]]:
    return ()


@dataclass(frozen=True, slots=True)
class Program(Generic[S]):
    """A program: the module that `python -m` runs, its description, and the dataclass of its settings.

    conflicts: yields a field and a phrase for each invalid combination of settings. The error message is the field's
    name, followed by the phrase.
    """

    module: str
    description: str
    settings: type[S]
    conflicts: Callable[[S], Iterable[tuple[str, str]]] = _no_conflicts

    def parse(self, arguments: Sequence[str], environment: Mapping[str, str]) -> S:
        """Return the settings.

        Raises SettingsError. `--help` and unknown flags end the process, as usual in argparse.
        """
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.module}", allow_abbrev=False, description=self.description
        )
        self.add_flags(parser)
        flags = vars(parser.parse_args(arguments))
        return self.build([*self.from_environment(environment), *self.from_flags(flags)])

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add a flag for each field. A flag that is not given sets no attribute."""
        for row in self.rows():
            words = f"{row.meaning}: {row.must_be} (default {row.default!r}; ${row.variable})"
            parser.add_argument(row.flag, default=argparse.SUPPRESS, help=words.replace("%", "%%"))

    def from_flags(self, flags: Mapping[str, Any]) -> Iterator[Given]:
        """Yield the values of the flags that `add_flags` declared."""
        for each in self._fields():
            if each.name in flags:
                yield Given(each.name, flags[each.name], f"flag {_flag(each.name)}")

    def from_environment(self, environment: Mapping[str, str]) -> Iterator[Given]:
        """Yield every environment variable with the program's prefix, known or not."""
        prefix = self.variable("")
        for variable, text in environment.items():
            if variable.startswith(prefix):
                yield Given(variable.removeprefix(prefix).lower(), text, f"environment variable {variable}")

    def variable(self, name: str) -> str:
        """Return the environment variable of a field."""
        return f"{self.module}_{name}".upper()

    def build(self, given: Iterable[Given]) -> S:
        """Return the settings from these values. Later values override earlier ones. Raises SettingsError."""
        known = {each.name: each for each in self._fields()}
        values: dict[str, object] = {}
        origins: dict[str, str] = {}
        for each in given:
            if each.name not in known:
                raise SettingsError(f"{each.origin}: unknown key {each.name!r}; the known keys are {', '.join(known)}")
            values[each.name], origins[each.name] = _read(each, known[each.name].metadata["kind"]), each.origin
        for name, one in known.items():
            if one.default is MISSING and name not in values:
                raise SettingsError(f"`{name}` is missing: set {_flag(name)} or {self.variable(name)}")
        settings = self.settings(**values)
        for name, sentence in self.conflicts(settings):
            raise SettingsError(f"{origins.get(name, 'default')}: `{name}` {sentence}")
        return settings

    def rows(self) -> Iterator[Row]:
        """Yield all settings in the order of their fields."""
        for each in self._fields():
            must_be = each.metadata["kind"].must_be
            default = "required" if each.default is MISSING else _written(each.default)
            yield Row(_flag(each.name), self.variable(each.name), must_be, default, each.metadata["meaning"])

    def _fields(self) -> tuple[Field[Any], ...]:
        return fields(self.settings)  # type: ignore[arg-type]  # a dataclass, which `type[S]` cannot say


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read(given: Given, kind: ValueKind[Any]) -> object:
    value = given.value
    if value is None or (given.is_text and value == "null" and not kind.is_text):
        if kind.is_nullable:
            return None
        raise _wrong(given, kind, "null")
    is_scalar = isinstance(value, str) if given.is_text or kind.is_text else isinstance(value, bool | int | float)
    if not is_scalar:
        raise _wrong(given, kind, repr(value))
    try:
        return kind.parse(value if isinstance(value, str) else str(value).lower())
    except ValueError as error:
        raise _wrong(given, kind, repr(error.args[0])) from None


def _wrong(given: Given, kind: ValueKind[Any], part: str) -> SettingsError:
    return SettingsError(f"{given.origin}: `{given.name}` must be {kind.must_be}, not {part}")


def _written(default: object) -> str:
    """Return a default in the format of a flag's value."""
    if isinstance(default, bool):
        return str(default).lower()
    if default is None:
        return ""
    return ",".join(default) if isinstance(default, tuple) else str(default)
