"""The complement of a schema: a schema of all values that do not fit it. Pure. Used by `choices` and `arrays`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from conveyor_engine.text.schema.document import Document, Place
from conveyor_engine.text.schema.keywords import KINDS, WORDS, is_number, is_whole, kind_of, kinds_of
from conveyor_engine.text.schema.strings import without

_DEPTH_MAX: Final = 16  # references and complements within each other
_TEXT_MAX: Final = 200  # characters of a text that a pattern excludes; its groups are nested as deeply
_WITHOUT_EFFECT: Final = frozenset({"$defs", "definitions", "then", "else", "minContains", "maxContains"})
# Keywords whose complement needs what schemas cannot say: the kind of the values that may violate them.
_OF_KIND: Final = {
    "multipleOf": "number", "pattern": "string", "format": "string", "uniqueItems": "array", "additionalItems": "array",
    "unevaluatedItems": "array", "patternProperties": "object", "additionalProperties": "object",
    "propertyNames": "object", "unevaluatedProperties": "object", "dependentSchemas": "object",
    "dependencies": "object",
}  # fmt: skip
# The complement of a limit: the kind, the keyword and the step to the next limit.
_LIMITS: Final = {
    "minimum": ("number", "exclusiveMaximum", 0), "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0), "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1), "maxProperties": ("object", "minProperties", 1),
}  # fmt: skip


class Complement(NamedTuple):
    """The complement of a schema. If it is not exact, some values that fit it fit the schema too."""

    schema: Any
    is_exact: bool


class Base:
    """What is known of the values of which a complement is built: they fit these schemas."""

    def __init__(self, *schemas: Any) -> None:
        self._schemas = [schema for schema in schemas if isinstance(schema, Mapping)]
        self.kinds = tuple(kind for kind in KINDS if all(kind in kinds_of(schema) for schema in self._schemas))
        self.is_whole = any(map(is_whole, self._schemas))  # numbers are integers

    def inside(self, name: str) -> "Base":
        """Return what is known of a property."""
        named = (schema.get("properties") for schema in self._schemas)
        return Base(*(properties.get(name) for properties in named if isinstance(properties, Mapping)))


ANY_BASE: Final = Base()


def _meets(schema: Any, base: Base) -> bool:
    """Return whether values of the base may fit the schema, by their kinds."""
    return isinstance(schema, bool) or any(kind in base.kinds for kind in kinds_of(schema))


class Negation:
    """Builds complements of schemas of one document. `spend` counts what it builds, and returns False at a limit."""

    def __init__(self, document: Document, spend: Callable[[int], bool]) -> None:
        self._document = document
        self._spend = spend

    def negate(self, schema: Any, at: Place, base: Base = ANY_BASE, depth: int = 0) -> Complement:
        """Return the complement of a schema at this place, within the values of the base."""
        if isinstance(schema, bool):
            return Complement(not schema, True)
        if depth > _DEPTH_MAX or not self._spend(1):
            return Complement(True, False)
        at = self._document.place_of(schema, at)
        parts = [each for each in self._parts(schema, at, base, depth + 1) if _meets(each.schema, base)]
        schemas = [part.schema for part in parts if part.schema is not False]
        return Complement(_any_of(schemas), all(part.is_exact for part in parts))

    def _parts(self, schema: Mapping[str, Any], at: Place, base: Base, depth: int) -> Iterator[Complement]:
        """Yield the complement of each keyword."""
        for name, value in schema.items():
            if name not in WORDS or name in _WITHOUT_EFFECT:
                continue
            if name in _LIMITS:
                kind, opposite, step = _LIMITS[name]
                if is_number(value) and (step == 0 or value + step >= 0):
                    yield Complement({"type": kind, opposite: value + step if step else value}, True)
            elif name in _OF_KIND:
                if value is not True or name == "uniqueItems":
                    yield Complement({"type": _OF_KIND[name]}, name == "uniqueItems" and not value)
            elif name in ("const", "enum"):
                yield from _negate_values([value] if name == "const" else value)
            else:
                yield from self._applied(name, value, schema, at, base, depth)

    def _applied(
        self, name: str, value: Any, schema: Mapping[str, Any], at: Place, base: Base, depth: int
    ) -> Iterator[Complement]:
        """Yield the complements of a keyword with schemas or names."""
        match name:
            case "type":
                broken = is_whole(schema) and not base.is_whole  # no schema says "no integer"
                kinds = [kind for kind in base.kinds if kind not in kinds_of(schema)]
                if broken and "number" in base.kinds:
                    yield Complement({"type": [*kinds, "number"]}, False)
                elif kinds:
                    yield Complement({"type": kinds}, True)
            case "required" if isinstance(value, list):
                yield from (Complement({"type": "object", "properties": {key: False}}, True) for key in value)
            case "properties":
                for key, each in value.items():
                    inner = self.negate(each, at, base.inside(key), depth)
                    if inner.schema is not False:
                        yield _wrap(inner, {"type": "object", "required": [key], "properties": {key: inner.schema}})
            case "dependentRequired":
                for key, names in value.items():
                    for needed in names:
                        properties = {key: True, needed: False}
                        yield Complement({"type": "object", "required": [key], "properties": properties}, True)
            case "allOf":
                yield from (self.negate(each, at, base, depth) for each in value)
            case "anyOf":
                parts = [self.negate(each, at, base, depth) for each in value]
                yield Complement({"allOf": [part.schema for part in parts]}, all(part.is_exact for part in parts))
            case "not":
                yield Complement(value, True)
            case "if":
                yield from self._condition(schema, at, base, depth)
            case "$ref":
                target, place = self._document.resolve(value, at)
                yield self.negate(target, place, base, depth)
            case _:
                yield from self._items(name, value, schema, at, depth)

    def _items(self, name: str, value: Any, schema: Mapping[str, Any], at: Place, depth: int) -> Iterator[Complement]:
        match name:
            case "items" if "prefixItems" not in schema and not isinstance(value, list):
                inner = self.negate(value, at, ANY_BASE, depth)
                if inner.schema is not False:
                    yield _wrap(inner, {"type": "array", "minItems": 1, "contains": inner.schema})
            case "prefixItems":
                for number, each in enumerate(value):
                    inner = self.negate(each, at, ANY_BASE, depth)
                    prefix = [*[True] * number, inner.schema]
                    if inner.schema is not False:
                        yield _wrap(inner, {"type": "array", "minItems": number + 1, "prefixItems": prefix})
            case "contains" if "minContains" not in schema and "maxContains" not in schema:
                inner = self.negate(value, at, ANY_BASE, depth)
                yield _wrap(inner, {"type": "array", "items": inner.schema})
            case "items" | "contains":
                yield Complement({"type": "array"}, False)
            case _:  # `oneOf`, dynamic references
                yield Complement(True, False)

    def _condition(self, schema: Mapping[str, Any], at: Place, base: Base, depth: int) -> Iterator[Complement]:
        condition = schema["if"]
        otherwise = self.negate(condition, at, base, depth)
        for name, chosen in (("then", Complement(condition, True)), ("else", otherwise)):
            inner = self.negate(schema.get(name, True), at, base, depth)
            if inner.schema is not False:
                yield Complement({"allOf": [chosen.schema, inner.schema]}, inner.is_exact and chosen.is_exact)


def _wrap(inner: Complement, schema: Mapping[str, Any]) -> Complement:
    return Complement(schema, inner.is_exact)


def _any_of(schemas: list[Any]) -> Any:
    if True in schemas:
        return True
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else False


def _negate_values(values: list[Any]) -> Iterator[Complement]:
    """Yield the complement of a choice of values."""
    by_kind = {kind: [value for value in values if kind_of(value) == kind] for kind in KINDS}
    yield Complement({"type": [kind for kind in KINDS if not by_kind[kind]]}, True)
    if by_kind["boolean"]:
        yield from (Complement({"const": value}, True) for value in (True, False) if value not in by_kind["boolean"])
    if numbers := sorted(set(by_kind["number"])):
        for low, high in zip([None, *numbers], [*numbers, None], strict=True):
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            yield Complement({"type": "number"} | {key: each for key, each in bounds.items() if each is not None}, True)
    if any(len(text) > _TEXT_MAX for text in by_kind["string"]):
        yield Complement({"type": "string"}, False)
    elif by_kind["string"]:
        yield Complement({"type": "string", "pattern": Written(without(by_kind["string"]))}, True)
    for kind, least in (("array", "minItems"), ("object", "minProperties")):
        if by_kind[kind]:
            is_empty = not any(by_kind[kind])
            yield Complement({"type": kind, **({least: 1} if is_empty else {})}, is_empty)


class Written(str):
    """A pattern that is in the library's syntax already."""

    __slots__ = ()
