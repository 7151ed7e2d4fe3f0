"""Serves /tokenize, /detokenize, /decode and /tokenizer_info, which use the tokenizer without an engine step."""

import json
from array import array
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.serving.http.app_state import app_state, model_facts
from conveyor_engine.serving.http.engine_response import prepare_request
from conveyor_engine.serving.http.events import encode
from conveyor_engine.serving.http.task_paths import TaskPath
from conveyor_engine.serving.preparing.tokens import (
    DecodeRequest,
    DetokenizeRequest,
    PreparedTokens,
    TeiToken,
    TokenizeRequest,
)


class Tokenized(msgspec.Struct):
    """The tokens of a text. `token_strs`: the tokens as the vocabulary spells them, if the request asks for them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """The text of tokens."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """Respond with the tokens of a prompt, or of a conversation that the chat template has rendered."""
    prepared = await _prepare(request, "tokenize")
    if prepared.answer:
        return _json(prepared.answer)
    ids = array("I", prepared.packed_token_ids).tolist()
    longest = model_facts(app_state(request)).max_model_len
    return _answer(Tokenized(len(ids), longest, ids, prepared.pieces))


async def detokenize(request: Request) -> Response:
    """Respond with the text of tokens, including special tokens."""
    return _answer(Detokenized((await _prepare(request, "detokenize")).text))


async def decode(request: Request) -> Response:
    """Respond with the text of each list of tokens."""
    return _json((await _prepare(request, "decode")).answer)


async def get_tokenizer_info(request: Request) -> Response:
    """Respond to GET /tokenizer_info. Raises InvalidRequest if the model reads no text."""
    text = app_state(request).model.text
    if text is None:
        raise InvalidRequest("this engine's model reads no text, so it has no tokenizer", code=ErrorCode.WRONG_TASK)
    return _json(json.dumps(text.describe()).encode())  # msgspec rejects integers above 64 bits


async def _prepare(request: Request, kind: str) -> PreparedTokens:
    async with prepare_request(request, kind) as arriving:
        prepared = arriving.prepared
    assert isinstance(prepared, PreparedTokens)
    return prepared


def _answer(body: msgspec.Struct) -> Response:
    return _json(encode(body))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


TOKEN_PATHS: Final = (
    TaskPath(
        "/tokenize", tokenize, "Returns the tokens of texts or of a conversation.", TokenizeRequest,
        (Tokenized, list[list[TeiToken]]),
    ),
    TaskPath("/detokenize", detokenize, "Returns the text of tokens.", DetokenizeRequest, Detokenized),
    TaskPath("/decode", decode, "Returns the text of each list of tokens.", DecodeRequest, list[str]),
)  # fmt: skip
