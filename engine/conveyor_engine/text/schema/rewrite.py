"""Rewrites the schemas of a document with the keywords that the library follows. Pure. Used by `prepare`.

An answer that fits the result fits the client's schema, except for the keywords in `relaxed`. The result allows no
properties but those that the schema names, unless the schema describes others: a small model that may add properties
writes them without end. vLLM's default backend, xgrammar, closes objects too.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from conveyor_engine.text.schema import arrays, choices, closing, objects
from conveyor_engine.text.schema.document import Document, Place
from conveyor_engine.text.schema.formats import ENCODINGS, FORMATS
from conveyor_engine.text.schema.keywords import WORDS, check, escape, essence, is_whole, is_writable, kinds_of
from conveyor_engine.text.schema.negate import ANY_BASE, Base, Complement, Negation, Written
from conveyor_engine.text.schema.numbers import BOUNDS, rewrite_bounds
from conveyor_engine.text.schema.parts import Node, Parts, has_more, merge_branches
from conveyor_engine.text.schema.problems import Relaxed, SchemaError
from conveyor_engine.text.schema.prune import within
from conveyor_engine.text.schema.strings import only_text, read_pattern

_SIZE_MAX: Final = 50_000  # schemas of the result; the library's own limit
_WIDTH_MAX: Final = 64  # branches of the schemas that apply to one value
_ADDED_MAX: Final = 4_000  # schemas that the engine adds to express one keyword by others
_MERGED_MAX: Final = 20_000  # schemas of the result after which references are not merged any more
_REFERENCES_MAX: Final = 16  # in a row
_TRIED_MAX: Final = 500  # names that are compared with a pattern; each takes half a millisecond
_COPIED: Final = ("type", "const", "enum", "multipleOf")
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_COUNT_MAX: Final = 2**31
_SCHEMAS: Final = ("items", "additionalProperties")
_IN_PLACE: Final = ("allOf", "anyOf")


def _too_large() -> SchemaError:
    return SchemaError(f"it leads to more than {_SIZE_MAX} schemas", "#")


class Rewriter:
    """Rewrites one document. `relaxed` has the keywords that answers might not follow.

    are_disjoint: returns whether no text matches two of the patterns.
    """

    def __init__(self, document: Document, are_disjoint: Callable[[Sequence[str]], bool]) -> None:
        self.document = document
        self.are_disjoint = are_disjoint
        self.relaxed: dict[Relaxed, None] = {}
        self.places: dict[int, str] = {}  # the JSON pointer of each schema of the result, by its identity
        self._kept: list[Any] = []  # so that no two schemas have the same identity
        self._widths: dict[int, int] = {}  # by the identity of a schema: the branches into which it expands
        self._sizes: dict[int, int] = {}
        self._origins: dict[int, Relaxed] = {}  # of schemas that the engine added: the keyword that they express
        self._negation = Negation(document, self.spend)
        self._definitions: dict[tuple[str, bool], str] = {}
        self._essences: dict[int, str] = {}  # of schemas of the document, by their identity
        self._waiting: list[tuple[str, Any, Place, bool]] = []
        self._merging: list[str] = []  # places of the references that are being merged with their siblings
        self._merged: dict[tuple[Place, bool], Any] = {}  # what these became, if no other reference led to them
        self._num_added = self._num_schemas = self._num_kept_apart = self._num_tried = 0

    def run(self, *, closed: bool) -> Any:
        """Return the rewritten document. Raises SchemaError."""
        root = self.rewrite(self.document.root, Place("", "#"), closed=closed)
        definitions: dict[str, Any] = {}
        while self._waiting:
            name, schema, at, closed = self._waiting.pop()
            definitions[name] = self.rewrite(schema, at, closed=closed)
        if not definitions or isinstance(root, bool):
            return root
        whole = {**root, "$defs": definitions}
        self.places[id(whole)] = "#"
        return whole

    def spend(self, number: int) -> bool:
        """Count schemas that the engine adds. Returns False if there are too many."""
        self._num_added += number
        return self._num_added <= _ADDED_MAX

    def fits(self, expressions: Sequence[str], name: str, keyword: Relaxed) -> bool:
        """Return whether a name matches all expressions. If there are too many names, relax the keyword.

        The library compares, because the patterns are the client's: Python's `re` may take exponential time.
        """
        self._num_tried += len(expressions)
        if self._num_tried > _TRIED_MAX:
            self.relaxed[keyword] = None
            return True
        return not any(self.are_disjoint([each, only_text(name)]) for each in expressions)

    def relax(self, keyword: str, at: Place) -> None:
        """Note that answers might not follow this keyword."""
        self.relaxed[Relaxed(keyword, at.pointer)] = None

    def negate(self, schema: Any, at: Place, base: Base = ANY_BASE) -> Complement:
        """Return the complement of a schema of the client, within the values of the base."""
        return self._negation.negate(schema, at, base)

    def follow(self, schema: Any, at: Place) -> Any:
        """Return the schema behind a reference that has nothing beside it."""
        for _ in range(_REFERENCES_MAX):
            if not isinstance(schema, Mapping) or "$ref" not in schema or len(WORDS & schema.keys()) > 1:
                break
            schema, at = self.document.resolve(schema["$ref"], self.document.place_of(schema, at))
        return schema

    def rewrite(self, schema: Any, at: Place, *, closed: bool, merged: bool = False) -> Any:
        """Return one rewritten schema.

        closed: an object has no properties but those that the schema names. merged: other schemas apply to the same
        value, so the result has no reference of its own, which the library could not always merge with them.
        """
        if isinstance(schema, bool):
            return schema
        self._num_schemas += 1
        if self._num_schemas > _SIZE_MAX:
            raise _too_large()
        node = Node(schema, self.document.place_of(schema, at), closed, merged or has_more(schema))
        check(schema, node.at.pointer)
        if not kinds_of(schema):
            return False
        parts = Parts()
        self._copy(node, parts)
        choices.rewrite(self, node, parts)
        if any(kind in kinds_of(schema) for kind in ("object", "array", "string")):
            self._rewrite_text(node, parts)
            arrays.rewrite(self, node, parts)
            objects.rewrite(self, node, parts)
        self._limit_width(parts)
        rewritten = parts.join()
        self._kept.append(rewritten)
        self.places.setdefault(id(rewritten), node.at.pointer)
        self._widths[id(rewritten)] = self._width(rewritten)
        if self.size(rewritten) > _SIZE_MAX:
            raise _too_large()
        return rewritten

    def size(self, schema: Any) -> int:
        """Return the number of schemas in a rewritten schema, each as often as it is written."""
        if not isinstance(schema, dict):
            return 1
        if id(schema) not in self._sizes:
            self._sizes[id(schema)] = 1 + sum(map(self.size, within(schema)))
        return self._sizes[id(schema)]

    def rewrite_value(self, schema: Any, at: Place, *, closed: bool) -> Any:
        """Return the rewritten schema of a property or an item.

        A schema that merges a reference with others becomes a definition, because it may lead to itself.
        """
        at = self.document.place_of(schema, at)
        if isinstance(schema, Mapping) and closing.merges_reference(self, Node(schema, at, closed)):
            return self.define(schema, at, closed=closed)
        return self.rewrite(schema, at, closed=closed)

    def add(self, parts: Parts, schema: Any, keyword: str, at: Place) -> None:
        """Add a schema that expresses a keyword by others."""
        self._kept.append(schema)
        self._origins[id(schema)] = Relaxed(keyword, at.pointer)
        parts.more.append(schema)

    def _limit_width(self, parts: Parts) -> None:
        """Relax keywords that the engine expresses by branches, until the branches of all together are few enough."""
        members = [*parts.own.get("allOf", ()), *parts.more]
        for each in reversed(members):
            if math.prod(map(self._width, members)) <= _WIDTH_MAX:
                break
            if id(each) in self._origins:
                self.relaxed[self._origins[id(each)]] = None
                members.remove(each)
        parts.more = [each for each in parts.more if any(each is other for other in members)]
        if "allOf" in parts.own:
            parts.own["allOf"] = [each for each in parts.own["allOf"] if any(each is other for other in members)]

    def _width(self, schema: Any) -> int:
        """Return the number of branches of a rewritten schema, in which `allOf` multiplies."""
        if not isinstance(schema, dict):
            return 1
        if id(schema) not in self._widths:
            branches = sum(map(self._width, schema.get("anyOf", ()))) or 1
            self._widths[id(schema)] = min(10**6, branches * math.prod(map(self._width, schema.get("allOf", ()))))
        return self._widths[id(schema)]

    def define(self, schema: Any, at: Place, *, closed: bool) -> dict[str, str]:
        """Return a reference to a schema of the document, which will be rewritten too."""
        if id(schema) not in self._essences:
            self._kept.append(schema)
            self._essences[id(schema)] = json.dumps(essence(schema))
        key = (f"{at.base} {self._essences[id(schema)]}", closed)
        if key not in self._definitions:
            self._definitions[key] = str(len(self._definitions))
            self._waiting.append((self._definitions[key], schema, at, closed))
        return {"$ref": f"#/$defs/{self._definitions[key]}"}

    def _copy(self, node: Node, parts: Parts) -> None:
        """Copy what the library follows as it is, in the order of the schema, which is that of properties too."""
        inner = node.closed and closing.is_choice(node.schema)
        shared = closing.find_shared(self, node)
        for name, value in node.schema.items():
            if name in _COPIED:
                if is_writable(value):
                    parts.own[name] = value
                else:
                    self.relax(name, node.at)
            elif name in _COUNTS:
                parts.own[name] = min(int(value), _COUNT_MAX)
            elif name in BOUNDS:
                parts.own |= rewrite_bounds(node.schema)
            elif name == "properties":
                parts.own[name] = {
                    key: self.rewrite_value(
                        each, node.inside(f"{name}/{escape(key)}"), closed=node.closed and key not in shared
                    )
                    for key, each in value.items()
                }
            elif name in _SCHEMAS and not isinstance(value, list):
                parts.own[name] = self.rewrite_value(value, node.inside(name), closed=node.closed and not shared)
            elif name in _IN_PLACE:
                members = choices.members(node) if name == "allOf" else list(enumerate(value))
                rewritten = [
                    self.rewrite(each, node.inside(f"{name}/{number}"), closed=inner, merged=node.merged)
                    for number, each in members
                ]
                parts.own[name] = merge_branches([*parts.own.get(name, ()), *rewritten])
            elif name in ("$ref", "$dynamicRef", "$recursiveRef"):
                self._refer(name, value, node, parts, closed=inner)
        if "format" in node.schema and is_whole(node.schema):
            parts.own |= rewrite_bounds(node.schema)

    def _refer(self, name: str, reference: str, node: Node, parts: Parts, *, closed: bool) -> None:
        target, place = self.document.resolve(reference, node.at, name)
        if name != "$ref" and not self.document.is_certain(reference):
            self.relax(name, node.at)
        if node.merged:
            referred = self._merge(target, place, closed=closed)
        else:
            referred = self.define(target, place, closed=closed)
        if node.schema.keys() & WORDS == {name} and isinstance(referred, dict):
            parts.own |= referred
        else:
            parts.own.setdefault("allOf", []).append(referred)

    def _merge(self, target: Any, place: Place, *, closed: bool) -> Any:
        """Return the rewritten target of a reference, or a reference to it if the target leads to itself."""
        if (known := self._merged.get((place, closed))) is not None:
            self._num_schemas += self.size(known)
            return known
        if place.pointer in self._merging or self._num_schemas >= _MERGED_MAX:
            self._num_kept_apart += 1
            return self.define(target, place, closed=closed)
        num_kept_apart = self._num_kept_apart
        self._merging.append(place.pointer)
        merged = self.rewrite(target, place, closed=closed, merged=True)
        self._merging.pop()
        if self._num_kept_apart == num_kept_apart:
            self._merged[place, closed] = merged
        return merged

    def _rewrite_text(self, node: Node, parts: Parts) -> None:
        """Rewrite `pattern`, `format` and `contentEncoding`."""
        schema = node.schema
        expressions: list[str] = []
        if isinstance(pattern := schema.get("pattern"), Written):
            expressions.append(pattern)
        elif pattern is not None:
            read = read_pattern(pattern)
            expressions += read.expressions
            if not read.is_exact:
                self.relax("pattern", node.at)
        known = schema["format"] if schema.get("format") in FORMATS else str(schema.get("contentEncoding"))
        if known in FORMATS and "string" in kinds_of(schema) and not (expressions and known in ENCODINGS):
            expressions.append(f"^(?:{FORMATS[known]})$")
        for number, expression in enumerate(dict.fromkeys(expressions)):
            if number == 0:
                parts.own["pattern"] = expression
            else:
                parts.more.append({**({"type": schema["type"]} if "type" in schema else {}), "pattern": expression})
