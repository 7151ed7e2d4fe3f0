"""Closes objects: allows no properties but those that the schema names. Pure. Used by `rewrite` and `objects`."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from conveyor_engine.text.schema.document import Place
from conveyor_engine.text.schema.keywords import WORDS
from conveyor_engine.text.schema.parts import Node, Parts
from conveyor_engine.text.schema.strings import read_pattern

if TYPE_CHECKING:
    from conveyor_engine.text.schema.rewrite import Rewriter

_CERTAIN: Final = ("allOf", "$ref")
_UNCERTAIN: Final = ("anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas", "dependencies")
_COMBINING: Final = frozenset({*_CERTAIN, *_UNCERTAIN, "$dynamicRef", "$recursiveRef"})
_OF_OBJECTS: Final = frozenset({
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies",
})  # fmt: skip
_OPENING: Final = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
_EVALUATING: Final = ("additionalProperties", "unevaluatedProperties")
_TREE_MAX: Final = 2_000  # schemas that describe one object


def is_choice(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema is only a choice of others, or another one: each of them can be closed by itself."""
    combining = _COMBINING & schema.keys()
    is_one = len(combining) == 1 and not _OF_OBJECTS & schema.keys()
    return is_one and ("allOf" not in combining or len(schema["allOf"]) == 1) and not combining & {"if", "not"}


class Tree:
    """What a schema and those that apply to the same value say about an object's properties."""

    def __init__(self) -> None:
        self.names = set[str]()  # in schemas that always apply
        self.others = set[str]()  # in schemas that apply to some values only
        self.elsewhere = set[str]()  # in other schemas than the first
        self.patterns = set[str]()
        self.required = set[str]()
        self.is_open = False  # one of the schemas describes properties without their names
        self.evaluates_all = False  # one of the other schemas leaves no property unevaluated
        self.is_certain = True  # whether it always does
        self.names_any = False


def find_beside(rewriter: "Rewriter", node: Node) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yield the schemas that apply to the same value as this one, and whether they always do."""
    waiting = [(each, node.at, sure) for each, sure in _beside(rewriter, node.schema, node.at)]
    seen = {id(node.schema)}
    while waiting and len(seen) < _TREE_MAX:
        schema, at, is_certain = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        at = rewriter.document.place_of(schema, at)
        yield schema, is_certain
        waiting += [(each, at, is_certain and sure) for each, sure in _beside(rewriter, schema, at)]


def look_around(rewriter: "Rewriter", node: Node) -> Tree:
    """Return what the schema and all schemas beside it say."""
    tree = Tree()
    for schema, is_certain in ((node.schema, True), *find_beside(rewriter, node)):
        named = schema.get("properties")
        if isinstance(named, Mapping):
            (tree.names if is_certain else tree.others).update(named)
            tree.elsewhere.update(named if schema is not node.schema else ())
            tree.names_any = True
        if isinstance(schema.get("patternProperties"), Mapping):
            tree.patterns.update(schema["patternProperties"])
        tree.required.update(listed(schema.get("required")))
        for dependent in ("dependentRequired", "dependencies"):
            if isinstance(named := schema.get(dependent), Mapping):
                tree.required.update(name for needed in named.values() for name in listed(needed))
        if any(key in schema for key in _OPENING if schema is not node.schema or key != "unevaluatedProperties"):
            tree.is_open = True
        if schema is not node.schema and any(key in schema for key in _EVALUATING):
            tree.evaluates_all, tree.is_certain = True, tree.is_certain and is_certain
    return tree


def find_shared(rewriter: "Rewriter", node: Node) -> set[str]:
    """Return the properties that other schemas beside this one describe too; they are not closed by themselves."""
    if not node.closed or not _COMBINING & node.schema.keys() or is_choice(node.schema):
        return set()
    return look_around(rewriter, node).elsewhere


def merges_reference(rewriter: "Rewriter", node: Node) -> bool:
    """Return whether a reference applies to the same value as other keywords."""
    if not _COMBINING & node.schema.keys() or node.schema.keys() & WORDS == {"$ref"}:
        return False
    return any("$ref" in schema for schema in (node.schema, *(each for each, _ in find_beside(rewriter, node))))


def listed(names: Any) -> list[str]:
    """Return the names of a list; none if `required` is true or false, as in draft 3."""
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _beside(rewriter: "Rewriter", schema: Mapping[str, Any], at: Place) -> Iterator[tuple[Any, bool]]:
    """Yield the schemas that apply to the same value, and whether they always do."""
    for key in (*_CERTAIN, *_UNCERTAIN):
        value = schema.get(key)
        if key == "$ref" and isinstance(value, str):
            yield rewriter.document.resolve(value, at)[0], True
        elif isinstance(value, list):
            yield from ((each, key in _CERTAIN) for each in value)
        elif key in ("if", "then", "else", "not"):
            yield value, False
        elif isinstance(value, Mapping):  # of dependencies
            yield from ((each, False) for each in value.values())


def close(rewriter: "Rewriter", node: Node, parts: Parts) -> None:
    """Allow no properties that have no name in the schema, if the schema does not describe them in another way."""
    schema, own = node.schema, parts.own
    is_explicit = "unevaluatedProperties" in schema
    if is_choice(schema) and not is_explicit:
        return
    tree = look_around(rewriter, node)
    if is_explicit:
        if tree.others - tree.names or not tree.is_certain:
            rewriter.relax("unevaluatedProperties", node.at)
        if "additionalProperties" in schema or tree.evaluates_all:
            return
    elif tree.is_open or not tree.names_any or not tree.required <= tree.names | tree.others:
        return
    names = tree.names | tree.others
    if not is_explicit and schema.get("minProperties", 0) > len(names):
        return
    if names:
        missing_names = dict.fromkeys(sorted(names - schema.get("properties", {}).keys()), True)
        own["properties"] = own.pop("properties", {}) | missing_names  # behind what else describes the object
    unknown = schema.get("unevaluatedProperties", False)
    if missing := [pattern for pattern in tree.patterns if pattern not in schema.get("patternProperties", {})]:
        patterns = "|".join(f"(?:{read_pattern(each).expressions[-1]})" for each in missing)
        own["patternProperties"] = {**own.get("patternProperties", {}), patterns: True}
    own["additionalProperties"] = rewriter.rewrite(unknown, node.inside("unevaluatedProperties"), closed=node.closed)
