"""Answers /tokenize, /detokenize and /decode in a worker, without an engine request.

Bodies and responses have the shapes of vLLM or of text-embeddings-inference (TEI). All tasks that read text have these
kinds of bodies. No I/O, no asyncio.
"""

from array import array
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Self

import msgspec
from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from tokenizers import Encoding

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.bounds import check_token_ids
from conveyor_engine.serving.preparing.chat_schemas import ChatRequest, Messages
from conveyor_engine.serving.preparing.conversations import read_conversation
from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.jobs import BodyKind, ServedModel, check_num_inputs, name_input, parse_body
from conveyor_engine.serving.preparing.schemas import ModelFields
from conveyor_engine.serving.preparing.tool_use import Choice, ToolUse, offer
from conveyor_engine.serving.preparing.tools import Tools
from conveyor_engine.serving.preparing.values import TokenId, list_of, parse_inputs
from conveyor_engine.wire.worker import Job, Part

TOKENS_MAX: Final = 65_536  # in one response in TEI's shape, which has about 60 bytes for each token
_CHAT_FIELDS: Final = ("messages", "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


_TEXT: Final[dict[str, Any]] = {"type": "string"}
_TEXTS: Final = {"anyOf": [_TEXT, list_of(_TEXT), {"type": "null"}]}
_IDS: Final = list_of({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31})
_ID_LISTS: Final = {"anyOf": [_IDS, list_of(_IDS)]}


def _read_texts(value: object) -> object:
    """Return a text, or a list of texts, as a list; None stays None."""
    texts = [value] if isinstance(value, str) else value
    if texts is None or (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
        return texts
    raise PydanticCustomError("inputs", "must be a text or a non-empty list of texts")


def _read_id_lists(value: object) -> list[Any]:
    """Return a list of token ids, or a list of such lists, as a list of lists."""
    lists = parse_inputs(value)
    if isinstance(lists[0], str):
        raise PydanticCustomError("ids", "must be a list of token ids, or a list of such lists, none of them empty")
    return lists


class TokenizeRequest(ModelFields):
    """POST /tokenize: `prompt` or `messages`."""

    place = Place.TOKENIZE

    prompt: str | None = None
    """A text."""
    messages: Messages | None = None
    """A conversation, which the model's chat template turns into a text."""
    inputs: Annotated[list[str] | None, BeforeValidator(_read_texts), WithJsonSchema(_TEXTS)] = None
    """A text, or several. The response is a list of each text's tokens, in TEI's shape."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens; default: true for texts, false for messages."""
    return_token_strs: bool | None = False
    """True: return the tokens' texts in the vocabulary too."""
    add_generation_prompt: bool | None = None
    """For messages. False: the prompt does not begin the assistant's turn."""
    continue_final_message: bool | None = False
    """For messages. True: an answer would continue the last message, without a new turn."""
    tools: Tools | None = None
    """For messages: functions that the model may call."""
    chat_template_kwargs: dict[str, Any] | None = None
    """For messages: variables for the chat template."""

    @model_validator(mode="after")
    def _check_tokenize(self) -> Self:
        if (self.prompt, self.messages, self.inputs).count(None) != 2:
            raise PydanticCustomError("prompt", "send exactly one of prompt, messages and inputs")
        if self.add_generation_prompt and self.continue_final_message:
            raise PydanticCustomError(
                "add_generation_prompt", "add_generation_prompt and continue_final_message exclude each other; send one"
            )
        ToolUse.of(offer(self.tools), Choice("auto"), None)  # raises if the tools conflict
        return self

    def chat(self) -> ChatRequest:
        """Return the messages as a chat request, so that the same code renders them."""
        return ChatRequest.model_construct(None, **{name: getattr(self, name) for name in _CHAT_FIELDS})


class DetokenizeRequest(ModelFields):
    """POST /detokenize."""

    place = Place.TOKENIZE

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    """The token ids to decode."""


class DecodeRequest(ModelFields):
    """POST /decode, in TEI's shape."""

    place = Place.TOKENIZE

    ids: Annotated[list[list[int]], PlainValidator(_read_id_lists), WithJsonSchema(_ID_LISTS)]
    """Token ids, or lists of them."""
    skip_special_tokens: bool | None = True
    """False: the texts include special tokens."""


class TeiToken(msgspec.Struct):
    """A token of a text. `start` and `stop` are byte offsets in the text's UTF-8; None for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class PreparedTokens(msgspec.Struct, frozen=True, array_like=True):
    """The content of the response, in one of three forms."""

    id: str
    ignored_fields: int
    packed_token_ids: bytes = b""  # /tokenize in vLLM's shape: uint32 each
    pieces: list[str] | None = None  # the tokens' texts in the vocabulary, with `packed_token_ids`
    text: str = ""  # /detokenize
    parts: list[Part] = []  # always empty: nothing is sent to the engine
    answer: bytes = b""  # JSON of the whole response, in TEI's shape


def prepare_tokenize(model: ServedModel, job: Job) -> PreparedTokens:
    """Answer a body of /tokenize. Raises InvalidRequest or UnknownModel."""
    fields, longest = parse_body(model, TokenizeRequest, job.body), job.facts.max_model_len
    if fields.inputs is not None:
        return PreparedTokens("tokenize", fields.ignored, answer=_tokenize_texts(model, job, fields, fields.inputs))
    adds = fields.messages is None if fields.add_special_tokens is None else fields.add_special_tokens
    if fields.messages is None:
        ids = model.tokenizer.encode(fields.prompt or "", longest, add_special_tokens=adds, param="prompt")
    else:
        ids = read_conversation(model, fields.chat(), job.facts, add_special_tokens=adds).token_ids
    pieces = [model.tokenizer.find_piece(token_id) for token_id in ids] if fields.return_token_strs else None
    return PreparedTokens("tokenize", fields.ignored, array("I", ids).tobytes(), pieces)


def _tokenize_texts(model: ServedModel, job: Job, fields: TokenizeRequest, texts: list[str]) -> bytes:
    check_num_inputs(len(texts), "inputs")
    answer: list[list[TeiToken]] = []
    adds = fields.add_special_tokens is not False
    for index, text in enumerate(texts):
        param = name_input("inputs", index, len(texts))
        encoding = model.tokenizer.encode_spans(text, job.facts.max_model_len, param, add_special_tokens=adds)
        answer.append(list(_describe(text, encoding)))
        _check_num_tokens(sum(map(len, answer)), "inputs")
    return msgspec.json.encode(answer)


def _describe(text: str, encoding: Encoding) -> Iterator[TeiToken]:
    """Yield each token in TEI's shape: a special token with its name, others with their part of the text."""
    read, num_bytes = 0, 0  # characters read so far, and their length in bytes
    tokens = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
    for token_id, piece, is_special, (start, stop) in tokens:
        if is_special:
            yield TeiToken(token_id, piece, True, None, None)
            continue
        if start < read:  # a token may begin within the character in which the previous token ends
            read, num_bytes = 0, 0
        num_bytes += len(text[read:start].encode())
        read, shown = start, text[start:stop]
        yield TeiToken(token_id, shown, False, num_bytes, num_bytes + len(shown.encode()))


def _check_num_tokens(number: int, param: str) -> None:
    if number > TOKENS_MAX:
        raise InvalidRequest(f"{param} has more than {TOKENS_MAX} tokens in all; send fewer at a time", param=param)


def prepare_decode(model: ServedModel, job: Job) -> PreparedTokens:
    """Answer a body of /decode. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, DecodeRequest, job.body)
    check_num_inputs(len(fields.ids), "ids")
    _check_num_tokens(sum(map(len, fields.ids)), "ids")
    for ids in fields.ids:
        check_token_ids(ids, job.facts, "ids")
    skips = fields.skip_special_tokens is not False
    texts = [model.tokenizer.decode(ids, skip_special_tokens=skips) for ids in fields.ids]
    return PreparedTokens("decode", fields.ignored, answer=msgspec.json.encode(texts))


def prepare_detokenize(model: ServedModel, job: Job) -> PreparedTokens:
    """Answer a body of /detokenize. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, DetokenizeRequest, job.body)
    if fields.tokens:
        check_token_ids(fields.tokens, job.facts, "tokens")
    return PreparedTokens("detokenize", fields.ignored, text=model.tokenizer.decode(fields.tokens))


TOKEN_KINDS: Final[Mapping[str, BodyKind]] = {
    "tokenize": BodyKind(prepare_tokenize, PreparedTokens, runs_template=True),
    "detokenize": BodyKind(prepare_detokenize, PreparedTokens),
    "decode": BodyKind(prepare_decode, PreparedTokens),
}
