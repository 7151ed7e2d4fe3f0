"""Tests each row of the table of fields without effect: accepted values, and errors that name the field."""

import json
from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionStreamOptionsParam,
    completion_create_params,
)
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.image_edit_params import ImageEditParamsBase
from openai.types.image_generate_params import ImageGenerateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel, ValidationError
from tests.engine.processes import EngineServer

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.chat_schemas import ChatMessage, ChatRequest
from conveyor_engine.serving.preparing.comparing_schemas import RerankRequest, ScoreRequest
from conveyor_engine.serving.preparing.completion_schemas import CompletionRequest
from conveyor_engine.serving.preparing.fields import OPENAI, ROWS, TABLE, Place, Row
from conveyor_engine.serving.preparing.refusals import invalid_request
from conveyor_engine.serving.preparing.schemas import ModelFields, StreamOptions
from conveyor_engine.serving.preparing.tokens import TokenizeRequest
from conveyor_engine.tasks.classify.bodies import ClassificationRequest
from conveyor_engine.tasks.embed.bodies import EmbeddingRequest
from conveyor_engine.tasks.generate.preparing.messages_schemas import MessagesRequest
from conveyor_engine.tasks.generate.preparing.responses_schemas import ResponsesRequest
from conveyor_engine.tasks.imagegenerate.bodies import ImageEditForm, ImageGenerationRequest

SAMPLES: list[Any] = [True, 3, "x", ["x"], {"a": "b"}]
CASES = [pytest.param(place, row, id=f"{place.name}-{row.name}") for place in Place for row in ROWS[place].values()]


def place_fields(place: Place, fields: dict[str, Any]) -> tuple[type[ModelFields], dict[str, Any]]:
    """Return a valid request with these fields at this place."""
    message: dict[str, Any] = {"role": "assistant", "content": "a"}
    match place:
        case Place.COMPLETIONS:
            return CompletionRequest, {"prompt": "a", **fields}
        case Place.EMBEDDINGS:
            return EmbeddingRequest, {"input": "a", **fields}
        case Place.RERANK:
            return RerankRequest, {"query": "a", "documents": ["b"], **fields}
        case Place.SCORE:
            return ScoreRequest, {"text_1": "a", "text_2": "b", **fields}
        case Place.CLASSIFY:
            return ClassificationRequest, {"input": "a", **fields}
        case Place.IMAGES:
            return ImageGenerationRequest, {"prompt": "a", **fields}
        case Place.TOKENIZE:
            return TokenizeRequest, {"prompt": "a", **fields}
        case Place.STREAM_OPTIONS:
            return CompletionRequest, {"prompt": "a", "stream": True, "stream_options": fields}
        case Place.RESPONSES:
            return ResponsesRequest, {"input": "a", **fields}
        case Place.MESSAGES:
            return MessagesRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, **fields}
        case Place.CHAT:
            return ChatRequest, {"messages": [message], **fields}
        case Place.MESSAGE:
            return ChatRequest, {"messages": [{**message, **fields}]}


def accepted(row: Row) -> list[Any]:
    return [None, *row.only, *(SAMPLES if row.why_ignored else ())]


def parse(place: Place, fields: dict[str, Any]) -> None:
    schema, body = place_fields(place, fields)
    try:
        schema.model_validate_json(json.dumps(body))
    except ValidationError as error:
        raise invalid_request(error) from None


@pytest.mark.parametrize(("place", "row"), CASES)
def test_what_changes_nothing_is_accepted(place: Place, row: Row) -> None:
    for value in accepted(row):
        parse(place, {row.name: value})


@pytest.mark.parametrize(("place", "row"), CASES)
def test_another_value_is_refused_with_its_name(place: Place, row: Row) -> None:
    for value in (0.5, {"x": 1}, ["x", "y"], 7, True, False, "x", 0, 1):
        if row.why_ignored or any(value == only and type(value) is type(only) for only in row.only):
            continue
        with pytest.raises(InvalidRequest) as caught:
            parse(place, {row.name: value})
        assert row.name in str(caught.value)
        if place not in (Place.STREAM_OPTIONS, Place.MESSAGE):
            assert caught.value.param == row.name
            assert caught.value.code == "unsupported_value"


def test_no_field_is_in_the_table_twice_or_acts_besides() -> None:
    acting: dict[Place, type[BaseModel]] = {
        Place.CHAT: ChatRequest, Place.COMPLETIONS: CompletionRequest, Place.EMBEDDINGS: EmbeddingRequest,
        Place.RERANK: RerankRequest, Place.SCORE: ScoreRequest, Place.CLASSIFY: ClassificationRequest,
        Place.STREAM_OPTIONS: StreamOptions, Place.MESSAGES: MessagesRequest,
        Place.RESPONSES: ResponsesRequest, Place.TOKENIZE: TokenizeRequest,
        Place.MESSAGE: ChatMessage, Place.IMAGES: ImageGenerationRequest,
    }  # fmt: skip
    assert sum(len(row.places) for row in TABLE) == sum(len(rows) for rows in ROWS.values())
    for place, schema in acting.items():
        assert not schema.model_fields.keys() & ROWS[place].keys()


OPENAIS: dict[Place, tuple[set[str], type]] = {
    Place.CHAT: (set(ChatRequest.model_fields), completion_create_params.CompletionCreateParamsBase),
    Place.COMPLETIONS: (set(CompletionRequest.model_fields), CompletionCreateParamsBase),
    Place.EMBEDDINGS: (set(EmbeddingRequest.model_fields), EmbeddingCreateParams),
    Place.RESPONSES: (set(ResponsesRequest.model_fields), ResponseCreateParamsBase),
    Place.IMAGES: (set(ImageGenerationRequest.model_fields) | {"stream"}, ImageGenerateParamsBase),
    Place.STREAM_OPTIONS: (set(StreamOptions.model_fields), ChatCompletionStreamOptionsParam),
    Place.MESSAGE: (set(ChatMessage.model_fields), ChatCompletionAssistantMessageParam),
}


@pytest.mark.parametrize("place", OPENAIS)
def test_every_field_that_openai_defines_is_known(place: Place) -> None:
    acting, params = OPENAIS[place]
    assert params.__annotations__.keys() <= acting | ROWS[place].keys()


def test_every_field_of_openai_s_edits_is_known() -> None:
    known = ImageEditForm.model_fields.keys() | ROWS[Place.IMAGES].keys()
    assert ImageEditParamsBase.__annotations__.keys() <= known


def test_every_field_that_anthropic_defines_is_known() -> None:
    assert MessageCreateParamsBase.__annotations__.keys() <= MessagesRequest.model_fields.keys() | ROWS[Place.MESSAGES]


def test_what_is_said_to_be_openai_s_is() -> None:
    defined = {name for _, params in OPENAIS.values() for name in params.__annotations__}
    defined |= ImageEditParamsBase.__annotations__.keys()
    named = {row.name for row in TABLE if OPENAI in row.defined_by}
    assert named - defined == {"annotations"}  # of answers, which come back


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_all_of_them_together_do_not_change_the_answer(server: EngineServer, path: str) -> None:
    place = Place.CHAT if path.startswith("chat") else Place.COMPLETIONS
    _, body = place_fields(place, {"max_tokens": 12, "temperature": 0.8, "seed": 5, "ignore_eos": True})
    bare = server.post(f"/v1/{path}", body).json()
    full = server.post(f"/v1/{path}", body | {name: accepted(row)[-1] for name, row in ROWS[place].items()}).json()
    assert full["choices"] == bare["choices"]
    assert full["usage"]["total_tokens"] == bare["usage"]["total_tokens"]
