"""The scalar types of Kubernetes that pydantic lacks: Quantity, Duration, int-or-percent.

Used by the models of the resource. Other modules use `parse_quantity` and `parse_duration_seconds` to get numbers.
This module does not know the resource.
"""

import re
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from conveyor_api.base import Rule

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))([KMGTPE]i|[eE][+-]?[0-9]+|[numkMGTPE])?")
_DURATION = re.compile(r"(?:[0-9]{1,6}(?:ms|s|m|h))+")
_PERCENT = re.compile(r"(?:0|[1-9][0-9]{0,2})%")
_DECIMAL_POWER: Final = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY_POWER: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_MOST_POWER: Final = 100  # no amount needs a larger one, and Kubernetes clamps it to 64 bits
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_quantity(value: int | str) -> Decimal:
    """Convert a Kubernetes quantity to a number: `"500m"` is 0.5, `"10Gi"` is 10 x 2**30. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity such as 500m, 2 or 10Gi")
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix in _BINARY_POWER:
        return number * (1 << _BINARY_POWER[suffix])
    power = _DECIMAL_POWER[suffix] if suffix in _DECIMAL_POWER else Decimal(suffix[1:])
    return number.scaleb(int(max(-_MOST_POWER, min(power, _MOST_POWER))))


def format_quantity(value: float) -> str:
    """Return `value` as a quantity: `"26"`, or rounded to thousandths if it is fractional: `"25600m"`."""
    milli = round(value * 1000)
    return f"{milli}m" if milli % 1000 else str(milli // 1000)


def parse_duration_seconds(value: str) -> float:
    """Convert a duration such as `"1m30s"` or `"10ms"` to seconds. Raises ValueError."""
    if _DURATION.fullmatch(value) is None:
        raise ValueError(f"{value!r} is not a duration such as 10ms, 2s or 1m30s")
    return sum(int(number) * _SECONDS[unit] for number, unit in re.findall(r"([0-9]+)(ms|s|m|h)", value))


def is_zero(value: int | str) -> bool:
    """Return whether an int-or-percent is 0 or 0%."""
    return value in (0, "0%")


class IntOrString:
    """Marks `int | str` as `x-kubernetes-int-or-string`. A boolean is not allowed."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(source)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"x-kubernetes-int-or-string": True}


def _is_quantity(value: int | str) -> bool:
    return _QUANTITY.fullmatch(str(value)) is not None and len(str(value)) <= 32


def _is_int_or_percent(value: int | str) -> bool:
    return value >= 0 if isinstance(value, int) else _PERCENT.fullmatch(value) is not None


Quantity = Annotated[
    int | str,
    IntOrString(),
    Rule(
        "type(self) == int || size(string(self)) <= 32 && isQuantity(string(self))",
        "must be a quantity such as 500m, 2 or 10Gi",
        _is_quantity,
    ),
]

IntOrPercent = Annotated[
    int | str,
    IntOrString(),
    Rule(
        "type(self) == int ? self >= 0 : string(self).matches('^(0|[1-9][0-9]{0,2})%$')",
        "must be a whole number of pods (0 or more) or a percentage such as 25%",
        _is_int_or_percent,
    ),
]

_DURATION_CEL: Final = "self.matches('^([0-9]{1,6}(ms|s|m|h))+$')"

Duration = Annotated[
    str,
    Field(max_length=16),
    Rule(
        _DURATION_CEL,
        "must be a duration such as 10ms, 2s or 1m30s",
        lambda value: _DURATION.fullmatch(value) is not None,
    ),
]


def between(least: str, most: str) -> Rule:
    """Return the rule that a Duration is from `least` to `most`. Another rule rejects text that is not a duration."""
    low, high = parse_duration_seconds(least), parse_duration_seconds(most)
    return Rule(
        f"!{_DURATION_CEL} || (duration(self) >= duration('{least}') && duration(self) <= duration('{most}'))",
        f"must be between {least} and {most}",
        lambda value: low <= parse_duration_seconds(value) <= high,
    )
