"""Finds which arguments of a tool may be strings. Formats that write arguments without quotes need this.

Pure. Used by `serving.preparing.tool_use`.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property, partial
from typing import Any, Final

from conveyor_engine.text.schema.document import Document, Place
from conveyor_engine.text.schema.keywords import TYPES, type_of
from conveyor_engine.text.schema.problems import SchemaError

_STRING: Final = "string"
_ROOT: Final = Place("", "#")
_DEPTH_MAX: Final = 128  # alternatives and references within each other


def find_strings(schema: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the arguments that may be strings, with the other types that each may have.

    Arguments of any type are left out, and those whose types cannot be found: a client may send any schema.
    """
    properties = schema.get("properties")
    reader = _Reader(schema)
    types = {name: reader.read(each) for name, each in properties.items()} if isinstance(properties, Mapping) else {}
    return {name: sorted(each - {_STRING}) for name, each in types.items() if _STRING in each and each != TYPES}


class _Reader:
    """Reads the types that values of a schema may have. Each reference is followed once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._referred: dict[str, Set[str]] = {}

    @cached_property
    def _document(self) -> Document:
        return Document(self._root)

    def read(self, schema: Any, depth: int = 0) -> Set[str]:
        """Return the types. All of them if the schema does not limit them."""
        if not isinstance(schema, Mapping) or depth == _DEPTH_MAX:
            return TYPES
        read = partial(self.read, depth=depth + 1)
        types: Set[str] = TYPES
        if isinstance(named := schema.get("type"), str | list):
            types = types & set(_names(named))
        if isinstance(values := schema.get("enum"), list):
            types = types & {type_of(value) for value in values}
        if "const" in schema:
            types = types & {type_of(schema["const"])}
        if isinstance(reference := schema.get("$ref"), str):
            types = types & self._follow(reference, read)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(keyword), list):
                types = types & set[str]().union(*map(read, parts))
        if isinstance(parts := schema.get("allOf"), list):
            types = frozenset(types).intersection(*map(read, parts))
        return types

    def _follow(self, reference: str, read: Callable[[Any], Set[str]]) -> Set[str]:
        if reference not in self._referred:
            self._referred[reference] = frozenset()  # a reference to itself adds no type
            try:
                self._referred[reference] = read(self._document.resolve(reference, _ROOT)[0])
            except SchemaError:
                self._referred[reference] = TYPES
        return self._referred[reference]


def _names(named: str | Sequence[Any]) -> list[Any]:
    names = [named] if isinstance(named, str) else [name for name in named if isinstance(name, str)]
    return [*names, "integer"] if "number" in names else names
