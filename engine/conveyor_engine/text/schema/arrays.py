"""Rewrites the keywords of arrays. Pure. Used by `rewrite`."""

from collections.abc import Mapping
from itertools import permutations
from typing import TYPE_CHECKING, Any, Final

from conveyor_engine.text.schema.closing import find_beside
from conveyor_engine.text.schema.keywords import WORDS, kind_of
from conveyor_engine.text.schema.parts import Node, Parts, only

if TYPE_CHECKING:
    from conveyor_engine.text.schema.rewrite import Rewriter

_UNIQUE_MAX: Final = 5  # values of which an array may have each once: 326 arrays
_FIRST_MAX: Final = 8  # places at which the first element that `contains` requires may be
_MORE_MAX: Final = 4  # numbers of such elements
_WRITTEN_MAX: Final = 8_000  # schemas that are written for one `contains`, which multiplies those within it


def rewrite(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    """Rewrite the keywords of arrays."""
    schema = node.schema
    before = schema["items"] if isinstance(schema.get("items"), list) else schema.get("prefixItems")
    if before is not None:
        name = "items" if before is schema.get("items") else "prefixItems"
        parts.own["prefixItems"] = [
            rewriter.rewrite_value(each, node.inside(f"{name}/{number}"), closed=node.closed)
            for number, each in enumerate(before)
        ]
        if name == "items" and "additionalItems" in schema:
            rest = rewriter.rewrite(schema["additionalItems"], node.inside("additionalItems"), closed=node.closed)
            parts.own["items"] = rest
    if schema.get("uniqueItems"):
        _rewrite_unique(rewriter, node, parts)
    if "contains" in schema:
        _rewrite_contains(rewriter, node, parts)
    if "unevaluatedItems" in schema:
        _rewrite_unevaluated(rewriter, node, parts)


def _rewrite_unique(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    """Write `uniqueItems` as a choice of arrays if the values of items are few."""
    schema, own = node.schema, parts.own
    least, most = own.get("minItems", 0), own.get("maxItems", _UNIQUE_MAX)
    if own.get("maxItems", 2) <= 1 or (own.get("items") is False and len(own.get("prefixItems", ())) <= 1):
        return
    values = (
        _find_values(rewriter, node) if "prefixItems" not in own and isinstance(schema.get("items"), Mapping) else None
    )
    if values is None or not 0 < len(values) <= _UNIQUE_MAX:
        rewriter.relax("uniqueItems", node.at)
        return
    arrays = [list(each) for size in range(least, min(most, len(values)) + 1) for each in permutations(values, size)]
    if rewriter.spend(len(arrays)):
        for name in ("items", "minItems", "maxItems"):
            own.pop(name, None)
        parts.more.append(only("array", [{"enum": arrays}], schema) if arrays else {"not": {}})
    else:
        rewriter.relax("uniqueItems", node.at)


def _find_values(rewriter: "Rewriter", node: Node) -> list[Any] | None:
    """Return the values of items if the schema lists them, without equal ones."""
    items = rewriter.follow(node.schema["items"], node.inside("items"))
    if not isinstance(items, Mapping):
        return None
    words = WORDS & items.keys()
    if words <= {"type", "enum"} and "enum" in words:
        values = items["enum"]
    elif words <= {"type", "const"} and "const" in words:
        values = [items["const"]]
    elif words == {"type"} and items["type"] in ("boolean", "null"):
        return [True, False] if items["type"] == "boolean" else [None]
    else:
        return None
    types = items.get("type")
    if any(kind_of(value) in ("array", "object") for value in values) or not isinstance(types, str | None):
        return None
    values = [
        value for value in values if types in (None, kind_of(value)) or (types == "integer" and isinstance(value, int))
    ]
    return [
        value for number, value in enumerate(values) if not any(_is_same(value, other) for other in values[:number])
    ]


def _is_same(value: Any, other: Any) -> bool:
    return kind_of(value) == kind_of(other) and bool(value == other)


def _rewrite_contains(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    """Write `contains` as a choice of the place of the first such element. Further ones follow it."""
    schema, at = node.schema, node.inside("contains")
    least, most = int(schema.get("minContains", 1)), schema.get("maxContains")
    if least == 0 and most is None:
        return
    wanted = rewriter.rewrite(schema["contains"], at, closed=False)
    others: Any = True
    if most is not None:
        complement = rewriter.negate(schema["contains"], at)
        if complement.is_exact:
            others = rewriter.rewrite(complement.schema, at, closed=False)
        else:
            rewriter.relax("maxContains", node.at)
            most = None
    numbers = range(least, least + 1 if most is None else min(int(most), least + _MORE_MAX) + 1)
    longest = parts.own.get("maxItems", _FIRST_MAX + numbers.stop)
    places = [
        (first, number)
        for number in numbers
        for first in range(_FIRST_MAX if number else 1)
        if first + number <= longest
    ]
    size = sum((first + 1) * rewriter.size(others) + number * rewriter.size(wanted) for first, number in places)
    if size > _WRITTEN_MAX or not rewriter.spend(len(places) * _FIRST_MAX):
        rewriter.relax("contains", node.at)
        return
    branches = [
        {
            "type": "array", "prefixItems": [*[others] * first, *[wanted] * number], "items": others,
            "minItems": first + number,
        }
        for first, number in places
    ]  # fmt: skip
    rewriter.add(parts, only("array", branches, schema), "contains", node.at)


def _rewrite_unevaluated(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    """Write `unevaluatedItems` as `items` behind the elements that other schemas describe."""
    longest = len(parts.own.get("prefixItems", ()))
    is_certain = True
    if "items" in node.schema and ("additionalItems" in node.schema or not isinstance(node.schema["items"], list)):
        return
    for schema, sure in find_beside(rewriter, node):
        if "items" in schema or "unevaluatedItems" in schema:
            if not sure:
                rewriter.relax("unevaluatedItems", node.at)
            return
        length = len(schema.get("prefixItems", ()))
        is_certain = is_certain and (sure or length <= longest) and "contains" not in schema
        longest = max(longest, length)
    if not is_certain or "contains" in node.schema:
        rewriter.relax("unevaluatedItems", node.at)
        if "contains" in node.schema:
            return
    rest = rewriter.rewrite(node.schema["unevaluatedItems"], node.inside("unevaluatedItems"), closed=node.closed)
    prefix = parts.own.get("prefixItems", [])
    parts.own["prefixItems"] = [*prefix, *[True] * (longest - len(prefix))]
    parts.own["items"] = rest
