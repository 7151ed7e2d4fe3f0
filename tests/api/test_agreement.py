"""The parser and the API server agree on random resources too: wrong types, missing members."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.api.builders import Json, build_full_body
from tests.api.conftest import Services

from conveyor_api.errors import InvalidResource
from conveyor_api.resource import InferenceService

Path = tuple[str | int, ...]
MISSING = object()
VALUES: tuple[Any, ...] = (
    *(MISSING, -1, 10**12, True, "", "x", "1", "é", "a" * 600, "1e100", "1" * 40),
    *([], {"a": 1}, [{"name": "x"}]),
)


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every member of `value`, at any depth."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from paths(value[key], (*path, key))


def build_changed_body(path: Path, value: Any) -> Json:
    """A resource with every field, with `value` in the place of the member of the spec at `path`."""
    body = build_full_body()
    holder: Any = body["spec"]
    for key in path[:-1]:
        holder = holder[key]
    if value is MISSING:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return body


def accepted_by_parser(body: Json) -> bool:
    try:
        InferenceService.parse(body, known_only=True)
    except InvalidResource:
        return False
    return True


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(paths(build_full_body()["spec"]))), st.sampled_from(VALUES))
def test_parser_and_api_server_agree(services_in_default: Services, path: Path, value: Any) -> None:
    body = build_changed_body(path, value)
    assert accepted_by_parser(body) == services_in_default.would_create(body)
