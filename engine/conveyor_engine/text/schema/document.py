"""The document of a schema: where its schemas are, and which schema a reference names. Pure. Used by `rewrite`."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from conveyor_engine.text.schema.keywords import children
from conveyor_engine.text.schema.problems import SchemaError

DEPTH_MAX: Final = 256  # schemas on a path from the root, `$ref` included; the library's recursion overflows at 900


class Place(NamedTuple):
    """Where a schema is: the address of its resource, and the JSON pointer from the root of the document."""

    base: str
    pointer: str


def too_deep(pointer: str) -> SchemaError:
    """Return the error for a schema that is nested too deeply."""
    return SchemaError(f"schemas are nested more than {DEPTH_MAX} levels deep, references included", pointer)


class Document:
    """A client's schema. Schemas are told apart by their identity, so the document must not change meanwhile."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._places: dict[int, Place] = {}
        self._resources: dict[str, tuple[Any, Place]] = {}  # by address, with `#name` for anchors
        self._dynamic: dict[str, list[tuple[Any, Place]]] = {}
        self._add(root, Place("", "#"))

    def _add(self, schema: Any, place: Place) -> None:
        """Add a schema and all within it."""
        waiting = [(schema, place, 1)]
        while waiting:
            each, at, depth = waiting.pop()
            if not isinstance(each, Mapping):
                continue
            if depth > DEPTH_MAX:
                raise too_deep("#")
            at = self._name(each, at)
            self._places[id(each)] = at
            waiting += [(child, Place(at.base, at.pointer + rest), depth + 1) for rest, child in children(each)]

    def _name(self, schema: Mapping[str, Any], at: Place) -> Place:
        """Register the names of a schema. Returns its place, whose base may be its own address."""
        address = schema.get("$id", schema.get("id"))
        if isinstance(address, str):
            if not address.startswith("#"):
                at = Place(_join(at.base, address)[0], at.pointer)
                self._resources.setdefault(at.base, (schema, at))
            else:
                self._resources.setdefault(at.base + address, (schema, at))
        if at.pointer == "#":
            self._resources.setdefault(at.base, (schema, at))
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                self._resources.setdefault(f"{at.base}#{name}", (schema, at))
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(name, []).append((schema, at))
        return at

    def place_of(self, schema: Any, otherwise: Place) -> Place:
        """Return the place of a schema of the document. `otherwise`: for a schema that the engine wrote."""
        return self._places.get(id(schema), otherwise)

    def resolve(self, reference: str, at: Place, keyword: str = "$ref") -> tuple[Any, Place]:
        """Return the schema that the reference names, and its place. Raises SchemaError if there is none."""
        address, fragment = _join(at.base, reference)
        if fragment and not fragment.startswith("/"):
            if (found := self._resources.get(f"{address}#{fragment}")) is not None:
                return self._first(fragment, found) if keyword != "$ref" else found
        elif (resource := self._resources.get(address)) is not None:
            schema, place = resource
            for part in unquote(fragment).split("/")[1:]:
                schema = _step(schema, part.replace("~1", "/").replace("~0", "~"))
                place = Place(place.base, f"{place.pointer}/{part}")
                if schema is None:
                    break
                place = self.place_of(schema, place)
            if isinstance(schema, Mapping | bool):
                if isinstance(schema, Mapping) and id(schema) not in self._places:
                    self._add(schema, place)  # it is not where schemas usually are
                return schema, place
        if keyword == "$ref" and fragment.startswith("/") and at.base and address != "":
            with suppress(SchemaError):  # older drafts have no `$id`, so it may be a name of no consequence
                return self.resolve(f"#{fragment}", Place(self.place_of(self.root, at).base, at.pointer), "")
        where = (
            "this document has no such schema" if address in self._resources else "the engine loads no other document"
        )
        raise SchemaError(f"{reference[:200]!r} names a schema that is not there: {where}", at.pointer, keyword)

    def _first(self, name: str, found: tuple[Any, Place]) -> tuple[Any, Place]:
        """Return the schema that a `$dynamicRef` names: that of the root's resource, which every path enters first."""
        root = self.place_of(self.root, Place("", "#")).base
        is_dynamic = any(each[0] is found[0] for each in self._dynamic.get(name, ()))
        return next((each for each in self._dynamic.get(name, ()) if is_dynamic and each[1].base == root), found)

    def is_certain(self, reference: str) -> bool:
        """Return whether the target of a `$dynamicRef` does not depend on the path that leads to it."""
        targets = self._dynamic.get(reference.partition("#")[2], [])
        root = self.place_of(self.root, Place("", "#")).base
        return len(targets) <= 1 or any(place.base == root for _, place in targets)


def _join(base: str, reference: str) -> tuple[str, str]:
    """Return the address and the fragment to which a reference leads."""
    if reference.startswith("#") or not base:
        address, _, fragment = reference.partition("#")
        return address or base, fragment
    try:
        return tuple(urldefrag(urljoin(base, reference)))  # type: ignore[return-value]
    except ValueError:  # it is no address
        return reference, ""


def _step(value: Any, name: str) -> Any:
    if isinstance(value, list) and re.fullmatch("[0-9]{1,9}", name) and int(name) < len(value):
        return value[int(name)]
    return value.get(name) if isinstance(value, Mapping) else None
