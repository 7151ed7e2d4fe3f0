"""Rewrites the bounds of numbers. Pure. Used by `rewrite`."""

import math
from collections.abc import Mapping
from typing import Any, Final

from conveyor_engine.text.schema.formats import INTEGERS
from conveyor_engine.text.schema.keywords import is_whole

_SMALLEST_STEP: Final = 1e-9  # to the next number that an exclusive bound allows
_DIGITS: Final = 15  # of a decimal number that a float represents exactly
_LARGEST: Final = 10**18  # bound that the library follows; wider bounds become this one
BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def rewrite_bounds(schema: Mapping[str, Any]) -> dict[str, float]:
    """Return `minimum` and `maximum`, as far as the schema has bounds.

    A bound of integers is rounded to the next integer. An exclusive bound of other numbers becomes the next number with
    more digits: llguidance 1.9.1 allows an exclusive bound itself if the other bound is less than 1 away. The other
    bound may be in another place (`allOf`, `$ref`), so all exclusive bounds are replaced.
    """
    whole = is_whole(schema)
    bounds: dict[str, float] = {}
    for inclusive, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        limits = [schema[inclusive]] if inclusive in schema else []
        excluded = schema.get(exclusive)
        if isinstance(excluded, bool):  # draft 4
            excluded = limits.pop() if excluded and limits else None
        limits = [_round(limit, sign) if whole else limit for limit in limits]
        if excluded is not None:
            limits.append(_next_whole(excluded, sign) if whole else _next(excluded, sign))
        if whole and inclusive in (known := INTEGERS.get(str(schema.get("format")), {})):
            limits.append(known[inclusive])
        if limits:
            bounds[inclusive] = (max if sign > 0 else min)([*limits, -sign * _LARGEST])
    return bounds


def _round(limit: float, sign: int) -> float:
    if not math.isfinite(limit):
        return limit
    return math.ceil(limit) if sign > 0 else math.floor(limit)


def _next_whole(limit: float, sign: int) -> float:
    rounded = _round(limit, sign)
    return rounded + sign if rounded == limit else rounded


def _next(limit: float, sign: int) -> float:
    """Return a number beyond the limit, with nine decimal places if a float has them."""
    whole_digits = len(str(abs(int(limit)))) if math.isfinite(limit) else _DIGITS
    digits = max(0, _DIGITS - whole_digits)
    beyond = round(limit + sign * max(_SMALLEST_STEP, 10.0**-digits), digits)
    return beyond if sign * beyond > sign * limit else limit + sign * math.ulp(limit)
