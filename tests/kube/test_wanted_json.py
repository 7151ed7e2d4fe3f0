"""Tests that only the wanted fields are decoded, and that other fields may be deep or malformed."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.cluster import make_endpoint, make_slice

from conveyor_api.names import INFERENCE_SERVICE_LABEL
from conveyor_gateway.watching.slices import parse_slice
from conveyor_kube.resources import ServiceBody, SliceBody
from conveyor_kube.wanted_json import Event, Named, Page, cut_depth, decode, decode_item

DEEP = '{"a":[' * 4000 + '"]}\\"{"' + "]}" * 4000


def as_raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


async def test_a_page_with_an_object_too_deep_to_be_parsed_is_read_with_all_its_objects() -> None:
    items = [
        f'{{"metadata":{{"name":"{name}"}},"spec":{spec}}}' for name, spec in (("a", "1"), ("b", DEEP), ("c", "2"))
    ]
    text = f'{{"items":[{",".join(items)}],"metadata":{{"resourceVersion":"7","continue":"more"}}}}'
    with pytest.raises(RecursionError):
        json.loads(text)
    page = await decode(text.encode(), Page)
    assert (page.metadata.resource_version, page.metadata.more) == ("7", "more")
    assert [decode_item(item, Named)["metadata"]["name"] for item in page.items or ()] == ["a", "b", "c"]


async def test_an_event_with_a_deep_object_is_read() -> None:
    text = f'{{"type":"ADDED","object":{{"spec":{DEEP},"metadata":{{"name":"b","resourceVersion":"8"}}}}}}'
    event = await decode(text.encode(), Event)
    assert event.type == "ADDED"
    assert decode_item(event.object, Named)["metadata"] == {"name": "b"}


def test_only_the_members_of_the_shape_are_kept() -> None:
    text = '{"metadata":{"name":"a","labels":{"x":"y"}},"spec":{"model":{"uri":"u"},"replicas":3},"other":{}}'
    assert decode_item(as_raw(text), ServiceBody) == {"metadata": {"name": "a"}, "spec": {"model": {"uri": "u"}}}


def test_of_a_slices_labels_only_the_one_that_is_read_is_kept() -> None:
    body = make_slice("s", "default", "qwen", 8000, make_endpoint("10.0.0.1"))
    body["metadata"]["labels"] |= {f"label-{number}": "x" for number in range(1000)}
    kept = decode_item(as_raw(json.dumps(body)), SliceBody)
    assert kept["metadata"]["labels"] == {INFERENCE_SERVICE_LABEL: "qwen"}
    assert parse_slice(kept) == parse_slice(body)


@pytest.mark.parametrize("spec", ["null", "[]", '"text"', "{}", DEEP])
def test_an_object_of_another_shape_is_known_by_its_name(spec: str) -> None:
    text = f'{{"metadata":{{"name":"a","namespace":"n"}},"spec":{spec}}}'
    assert decode_item(as_raw(text), ServiceBody) == {"metadata": {"name": "a", "namespace": "n"}}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def cut(value: Any, depth: int) -> Any:
    if isinstance(value, dict | list) and depth == 0:
        return None
    if isinstance(value, dict):
        return {key: cut(member, depth - 1) for key, member in value.items()}
    if isinstance(value, list):
        return [cut(member, depth - 1) for member in value]
    return value


@given(JSON, st.integers(0, 4), st.booleans())
def test_what_lies_too_deep_becomes_null_and_nothing_else_changes(value: Any, depth: int, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    assert json.loads(cut_depth(text, depth).decode(errors="surrogatepass")) == cut(value, depth)
