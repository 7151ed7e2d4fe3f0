"""POST /tokenize and POST /detokenize: what the model's tokenizer makes of a text, without a step of the engine."""

from array import array

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from conveyor_engine.serving.http.app_state import app_state, model_facts
from conveyor_engine.serving.http.engine_response import prepare_request
from conveyor_engine.serving.http.formats import encode
from conveyor_engine.serving.preparing.tokens import PreparedTokens


class Tokenized(msgspec.Struct):
    """The tokens of a text. `token_strs`: as the vocabulary has them, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """The text of tokens."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """Answers with the tokens of a prompt, or of a conversation as the chat template shows it."""
    prepared = await _prepare(request, "tokenize")
    ids = array("I", prepared.packed_token_ids).tolist()
    longest = model_facts(app_state(request)).max_model_len
    return _answer(Tokenized(len(ids), longest, ids, prepared.pieces))


async def detokenize(request: Request) -> Response:
    """Answers with the text of tokens, special tokens included."""
    return _answer(Detokenized((await _prepare(request, "detokenize")).text))


async def _prepare(request: Request, kind: str) -> PreparedTokens:
    async with prepare_request(request, kind) as arriving:
        prepared = arriving.prepared
    assert isinstance(prepared, PreparedTokens)
    return prepared


def _answer(body: msgspec.Struct) -> Response:
    return Response(encode(body), media_type="application/json")
