"""Rewrites the keywords of objects. Pure. Used by `rewrite`."""

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

from conveyor_engine.text.schema.closing import close, listed
from conveyor_engine.text.schema.formats import FORMATS
from conveyor_engine.text.schema.keywords import WORDS, escape, essence
from conveyor_engine.text.schema.parts import Node, Parts, only
from conveyor_engine.text.schema.problems import Relaxed
from conveyor_engine.text.schema.strings import read_pattern

if TYPE_CHECKING:
    from conveyor_engine.text.schema.rewrite import Rewriter

_OPTIONAL_MAX: Final = 5  # properties whose number is limited; each doubles the branches


def rewrite(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    """Rewrite the keywords of objects."""
    schema = node.schema
    if required := listed(schema.get("required")):
        parts.own["required"] = list(dict.fromkeys(required))
    _rewrite_patterns(rewriter, node, parts)
    if node.closed or "unevaluatedProperties" in schema:
        close(rewriter, node, parts)
    _rewrite_names(rewriter, node, parts)
    _rewrite_dependents(rewriter, node, parts)
    if "minProperties" in schema or "maxProperties" in schema:
        _limit(rewriter, node, parts)


def _rewrite_patterns(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    """Rewrite `patternProperties`. The library follows patterns that exclude each other."""
    groups: dict[str, tuple[list[str], Any]] = {}  # by the text of the schema
    for pattern, each in node.schema.get("patternProperties", {}).items():
        read = read_pattern(pattern)
        if len(read.expressions) > 1 or not read.is_exact:
            rewriter.relax("patternProperties", node.at)
        same = [name for name, other in node.schema.get("properties", {}).items() if essence(other) == essence(each)]
        for name in same:
            if rewriter.fits(read.expressions, name, Relaxed("patternProperties", node.at.pointer)):
                parts.own["properties"][name] = True  # the library merges it with the schema of the pattern
        closed = node.closed and "properties" not in node.schema
        inner = rewriter.rewrite_value(each, node.inside(f"patternProperties/{escape(pattern)}"), closed=closed)
        groups.setdefault(json.dumps(inner), ([], inner))[0].append(read.expressions[-1])
    found = {
        "|".join(f"(?:{each})" for each in texts) if texts[1:] else texts[0]: inner for texts, inner in groups.values()
    }
    if len(found) > 1 and not rewriter.are_disjoint(list(found)):
        rewriter.relax("patternProperties", node.at)
        found = {"|".join(f"(?:{each})" for each in found): {"anyOf": list(found.values())}}
    if found:
        parts.own["patternProperties"] = found


def _rewrite_names(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    """Rewrite `propertyNames`: names become properties, and a pattern of names becomes a pattern of properties."""
    if "propertyNames" not in node.schema:
        return
    names = rewriter.follow(node.schema["propertyNames"], node.at)
    effects = {} if names is True else names if isinstance(names, Mapping) else {"enum": []}
    effects = {key: value for key, value in effects.items() if key in WORDS and (key, value) != ("type", "string")}
    if not effects:
        return
    others, own = parts.own.get("additionalProperties", True), parts.own
    allowed = effects["enum"] if "enum" in effects else [effects["const"]] if "const" in effects else None
    if "patternProperties" in own or (
        allowed is None and not effects.keys() <= {"pattern", "minLength", "maxLength", "format"}
    ):
        rewriter.relax("propertyNames", node.at)
    elif allowed is not None:
        if len(effects) > 1:
            rewriter.relax("propertyNames", node.at)
        allowed = [name for name in allowed if isinstance(name, str)]
        given = own.get("properties", {})
        own["properties"] = {name: each if name in allowed else False for name, each in given.items()} | {
            name: others for name in allowed if name not in given
        }
        own["additionalProperties"] = False
    else:
        _rewrite_names_by_pattern(rewriter, node, parts, effects, others)


def _rewrite_names_by_pattern(
    rewriter: "Rewriter", node: Node, parts: Parts, effects: Mapping[str, Any], others: Any
) -> None:
    own = parts.own
    read = read_pattern(effects.get("pattern", ""))
    expressions = [each for each in read.expressions if each]
    least, most = int(effects.get("minLength", 0)), effects.get("maxLength")
    if effects.get("format") in FORMATS and not expressions:
        expressions.append(f"^(?:{FORMATS[effects['format']]})$")
    if least or most is not None:
        expressions.append(f"^(?s:.{{{least},{'' if most is None else int(most)}}})$")
    if len(expressions) > 1 or not read.is_exact:
        rewriter.relax("propertyNames", node.at)
    named, keyword = own.get("properties", {}), Relaxed("propertyNames", node.at.pointer)
    if excluded := [name for name in named if not rewriter.fits(expressions, name, keyword)]:
        own["properties"] = named | dict.fromkeys(excluded, False)
    if expressions:
        own["patternProperties"] = {expressions[0]: others}
        own["additionalProperties"] = False


def _rewrite_dependents(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    """Rewrite what depends on the presence of a property: either it is absent, or the other schema holds."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for key, needed in node.schema.get(keyword, {}).items():
            if needed in ([], True, {}):
                continue
            holds = {"required": needed} if isinstance(needed, list) else needed
            branches = [
                rewriter.rewrite({"type": "object", "properties": {key: False}}, node.at, closed=False),
                rewriter.rewrite({"type": "object", "allOf": [holds]}, node.inside(keyword), closed=False, merged=True),
            ]
            rewriter.add(parts, only("object", branches, node.schema), keyword, node.at)


def _limit(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    """Rewrite limits of the number of properties. The library follows them if all named properties are required."""
    own = parts.own
    least, most = own.get("minProperties", 0), own.get("maxProperties")
    required = set(own.get("required", ()))
    possible = {name for name, each in own.get("properties", {}).items() if each is not False}
    optional = sorted(possible - required)
    is_closed = own.get("additionalProperties") is False and "patternProperties" not in own
    if least <= len(required):
        own.pop("minProperties", None)
        least = 0
    if most is not None and is_closed and most >= len(required | possible):
        own.pop("maxProperties")
        most = None
    if least - len(required) > 1 and not is_closed:
        rewriter.relax("minProperties", node.at)  # the library allows a name that the schema does not give twice
    if not optional or (not least and most is None):
        return
    bounds = {key: own.pop(key) for key in ("minProperties", "maxProperties") if key in own}
    num_least, num_most = max(0, least - len(required)), None if most is None else most - len(required)
    branches = []
    for there, are_all in _choose(optional, num_least, num_most, is_closed=is_closed):
        presence = {name: name in there for name in optional if are_all or name in there}
        branch: dict[str, Any] = {"type": "object", "properties": presence, "required": sorted(there)}
        branches.append(branch | (bounds if are_all and not is_closed else {}))
    if branches and rewriter.spend(len(branches) * len(optional)):
        rewriter.add(parts, only("object", branches, node.schema), next(iter(bounds)), node.at)
    else:
        for key in bounds:
            rewriter.relax(key, node.at)


def _choose(optional: list[str], least: int, most: int | None, *, is_closed: bool) -> Iterator[tuple[set[str], bool]]:
    """Yield sets of optional properties, and whether the other ones are absent then. Nothing if there are too many."""
    if is_closed and most is None and (least == 1 or len(optional) <= _OPTIONAL_MAX) and len(optional) <= 4**3:
        yield from ((set(some), False) for some in combinations(optional, least))
    elif len(optional) <= _OPTIONAL_MAX:
        for number in range(len(optional) + 1):
            if number >= (least if is_closed else 0) and (most is None or number <= most):
                yield from ((set(some), True) for some in combinations(optional, number))
    elif not is_closed and most is None and least == 1:
        yield from (({name}, False) for name in optional)
        yield set(), True
