"""What the modules of `text.schema` share while they rewrite one schema. Pure."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from conveyor_engine.text.schema.document import Place
from conveyor_engine.text.schema.keywords import KINDS, WORDS, kinds_of

_TOGETHER: Final = ("patternProperties", "additionalProperties")
_PLAIN: Final = frozenset({"type", "properties", "required"})
_MEMBERS_MAX: Final = 100  # of an `allOf`; the library's work grows with the square of their number


class Node(NamedTuple):
    """A schema that is being rewritten.

    closed: its objects have no properties but those that the schema names. merged: other schemas, or other keywords
    of this one, apply to the same value.
    """

    schema: Mapping[str, Any]
    at: Place
    closed: bool
    merged: bool = False

    def inside(self, path: str) -> Place:
        """Return the place of a schema within this one."""
        return Place(self.at.base, f"{self.at.pointer}/{path}")


class Parts:
    """The result: its own keywords, and rewritten schemas that must hold too."""

    def __init__(self) -> None:
        self.own: dict[str, Any] = {}
        self.more: list[Any] = []

    def join(self) -> Any:
        """Return the whole schema."""
        # The library reads these two together only if no other schema is between them.
        own = {name: each for name, each in self.own.items() if name not in _TOGETHER}
        own |= {name: self.own[name] for name in _TOGETHER if name in self.own}
        if self.more and not own:
            return self.more[0] if len(self.more) == 1 else {"allOf": self.more}
        if self.more:
            own["allOf"] = [*own.pop("allOf", []), *self.more]
        return _take_objects(own) if len(own.get("allOf", ())) > _MEMBERS_MAX else own


def _take_objects(own: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with the properties of those objects in `allOf` whose properties nothing else describes."""
    if "patternProperties" in own or own.get("type", "object") != "object":
        return own
    numbers = Counter(name for each in own["allOf"] if isinstance(each, dict) for name in each.get("properties", ()))
    named, unnamed = own.get("properties", {}), own.get("additionalProperties", True)

    def is_alone(schema: Any) -> bool:
        if not isinstance(schema, dict) or not schema.keys() <= _PLAIN or schema.get("type") != "object":
            return False
        names = schema.get("properties", {}).keys() | schema.get("required", ())
        return all(numbers[name] <= 1 and named.get(name, unnamed) is True for name in names)

    if not (taken := [each for each in own["allOf"] if is_alone(each)]):
        return own
    properties = {name: value for each in taken for name, value in each.get("properties", {}).items()}
    required = [name for each in (*taken, own) for name in each.get("required", ())]
    left = {"allOf": [each for each in own["allOf"] if not is_alone(each)]}
    own = {name: value for name, value in own.items() if name not in ("allOf", "type", "properties", "required")}
    others = {name: value for name, value in named.items() if name not in properties}
    whole = {"type": "object", "properties": properties | others}
    return (left if left["allOf"] else {}) | whole | {"required": list(dict.fromkeys(required))} | own


def has_more(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema has several keywords with an effect."""
    combined = schema.get("allOf")
    return len(WORDS & schema.keys() - {"$defs", "definitions"}) > 1 or (
        isinstance(combined, list) and len(combined) > 1
    )


def only(kind: str, branches: list[Any], schema: Mapping[str, Any]) -> Any:
    """Return a schema for which values of one kind fit one of the branches. Values of other kinds may be any."""
    others = [each for each in KINDS if each != kind and each in kinds_of(schema)]
    return {"anyOf": [*branches, *([{"type": others}] if others else [])]}


def merge_branches(branches: Sequence[Any]) -> list[Any]:
    """Return the branches, each once. The cost of a mask grows with the cube of their number."""
    distinct = {json.dumps(each, sort_keys=True): each for each in reversed(branches)}
    return list(reversed(distinct.values()))
