"""The schema is structural, bounded and small, whatever pydantic emits."""

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import yaml
from pydantic import Field

from conveyor_api.api_key import APIKey
from conveyor_api.base import ApiModel
from conveyor_api.crd import UnsupportedSchema, _structural, build_crds, build_schema
from conveyor_api.served_name import ServedName
from crds.generate import render_crd

Node = dict[str, Any]


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every schema within a schema, with its path."""
    yield path, node
    for name, member in node.get("properties", {}).items():
        yield from walk(member, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if isinstance(node.get(keyword), dict):
            yield from walk(node[keyword], f"{path}[]")


NODES = {
    **dict(walk(build_schema())),
    **{f".ServedName{path}": node for path, node in walk(build_schema(ServedName))},
    **{f".APIKey{path}": node for path, node in walk(build_schema(APIKey))},
}
TYPE_META = tuple(f"{kind}.{field}" for kind in ("", ".ServedName", ".APIKey") for field in ("apiVersion", "kind"))


def test_nothing_is_left_that_a_structural_schema_forbids() -> None:
    forbidden = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "not", "title", "const", "pattern"}
    assert not {path: forbidden & set(node) for path, node in NODES.items() if forbidden & set(node)}


def test_every_node_has_a_type() -> None:
    assert not [path for path, node in NODES.items() if not {"type", "x-kubernetes-int-or-string"} & set(node)]


def test_properties_and_additional_properties_are_never_together() -> None:
    assert not [path for path, node in NODES.items() if {"properties", "additionalProperties"} <= set(node)]


def test_everything_that_can_grow_is_bounded() -> None:
    limits = {"string": "maxLength", "array": "maxItems"}
    for path, node in NODES.items():
        limit = limits.get(node.get("type", ""))
        if limit and "enum" not in node and path not in TYPE_META:
            assert limit in node, path
        assert "x-kubernetes-preserve-unknown-fields" not in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_every_number_that_people_write_has_limits() -> None:
    spec = {path: node for path, node in NODES.items() if path.startswith(".spec") and node.get("type") == "integer"}
    unbounded = {path for path, node in spec.items() if "minimum" not in node or "maximum" not in node}
    assert unbounded == {".spec.kvCache.blockSize", ".spec.pod.tolerations[].tolerationSeconds"}


def test_every_integer_has_its_width() -> None:
    integers = {path: node.get("format") for path, node in NODES.items() if node.get("type") == "integer"}
    assert {format for path, format in integers.items()} == {"int32", "int64"}
    assert integers[".spec.replicas"] == "int32"
    assert integers[".status.observedGeneration"] == "int64"


def test_enums_are_camel_case() -> None:
    values = {value for node in NODES.values() for value in node.get("enum", ())}
    assert {"Continuous", "Dynamic"} <= values
    assert not [value for value in values if not (value[0].isupper() and value.isalnum())]


def test_every_field_is_described() -> None:
    described = [path for path in NODES if path.startswith((".spec", ".status")) and not path.endswith("[]")]
    assert not [path for path in described if not NODES[path].get("description")]


def test_no_default_is_null() -> None:
    assert not [path for path, node in NODES.items() if node.get("default", "") is None]


def test_the_crd_is_small() -> None:
    """`kubectl apply` keeps it in an annotation too, of which an object may have 256 KiB."""
    assert max(len(render_crd(crd).encode()) for crd in build_crds()) < 150_000


def test_what_is_rendered_is_what_was_built() -> None:
    assert [yaml.safe_load(render_crd(crd)) for crd in build_crds()] == build_crds()


def test_a_field_with_two_types_is_refused() -> None:
    class Wrong(ApiModel):
        field: int | str = 1

    schema = Wrong.model_json_schema()
    with pytest.raises(UnsupportedSchema, match="one type"):
        _structural(schema, {})


def test_a_field_of_any_shape_is_refused() -> None:
    class Wrong(ApiModel):
        field: dict[str, Any]

    with pytest.raises(UnsupportedSchema, match="untyped"):
        _structural(Wrong.model_json_schema(), {})


def test_a_keyword_that_kubernetes_does_not_know_is_refused() -> None:
    class Wrong(ApiModel):
        field: Annotated[int, Field(gt=0)] = 1

    with pytest.raises(UnsupportedSchema, match="exclusiveMinimum"):
        _structural(Wrong.model_json_schema(), {})
