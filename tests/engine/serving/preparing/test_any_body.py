"""Tests that any JSON is accepted or rejected in words, at a bounded cost."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.http.failures import failure_body
from conveyor_engine.serving.preparing.chat_schemas import ChatRequest
from conveyor_engine.serving.preparing.completion_schemas import CompletionRequest
from conveyor_engine.serving.preparing.fields import ROWS
from conveyor_engine.serving.preparing.refusals import invalid_request

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.sampled_from([CompletionRequest, ChatRequest]), st.data())
def test_any_json_is_accepted_or_refused_in_words(schema: Any, data: st.DataObject) -> None:
    names = st.sampled_from(sorted({*schema.model_fields, *ROWS[schema.place]})) | st.text(max_size=6)
    body = data.draw(json_values | st.dictionaries(names, json_values, max_size=5))
    with contextlib.suppress(InvalidRequest):
        validate(schema, json.dumps(body))


def validate(schema: type[CompletionRequest] | type[ChatRequest], body: str) -> None:
    """Validate a body. Raises only errors that have a response."""
    try:
        schema.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error) from None


@pytest.mark.parametrize(
    ("schema", "fields"),
    [
        (ChatRequest, {"messages": [1] * 10_000}),
        (ChatRequest, {"messages": [{}] * 10_000}),
        (CompletionRequest, {"stop_token_ids": ["a"] * 10_000}),
    ],
)
def test_a_list_of_wrong_things_is_read_up_to_the_first(schema: Any, fields: dict[str, Any]) -> None:
    """4 MiB of them made two million errors: 13 seconds and 600 MiB."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate_json(json.dumps({"prompt": "a", **fields}))
    assert caught.value.error_count() < 5


def test_an_answer_quotes_only_the_beginning_of_what_a_client_wrote() -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(ChatRequest, json.dumps({"messages": [{"role": "k" * 500_000, "content": [{"type": "k" * 500_000}]}]}))
    assert len(failure_body(refused.value)) < 2000
