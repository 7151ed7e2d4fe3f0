"""The bodies of /tokenize and /detokenize, in vLLM's shape, and what a worker makes of them: no engine request.

The kinds of bodies of `tasks.generate`. No I/O, no asyncio.
"""

from array import array
from typing import Annotated, Any, Final, Self

import msgspec
from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from conveyor_engine.serving.preparing.chat_schemas import ChatMessage, ChatRequest
from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.jobs import ServedModel, parse_body
from conveyor_engine.serving.preparing.prepare import check_token_ids
from conveyor_engine.serving.preparing.schemas import ModelFields
from conveyor_engine.serving.preparing.tools import TOOLS_MAX, Tool
from conveyor_engine.serving.preparing.values import TokenId
from conveyor_engine.wire.worker import Job, Part

_CHAT_FIELDS: Final = ("messages", "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


class TokenizeRequest(ModelFields):
    """POST /tokenize: `prompt` or `messages`."""

    place = Place.TOKENIZE

    prompt: str | None = None
    """A text."""
    messages: (
        Annotated[
            list[Annotated[ChatMessage, AfterValidator(ChatMessage.for_template)]], Field(min_length=1, fail_fast=True)
        ]
        | None
    ) = None
    """A conversation, which the model's chat template turns into a text."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own; default: to a prompt, not to messages."""
    return_token_strs: bool | None = False
    """True: return the tokens' texts in the vocabulary too."""
    add_generation_prompt: bool | None = None
    """For messages. False: the prompt does not begin the assistant's turn."""
    continue_final_message: bool | None = False
    """For messages. True: an answer would continue the last message, without a new turn."""
    tools: Annotated[list[Tool], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    """For messages: functions that the model may call."""
    chat_template_kwargs: dict[str, Any] | None = None
    """For messages: variables for the chat template."""

    @model_validator(mode="after")
    def _check_tokenize(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "send prompt or messages, one of them")
        if self.add_generation_prompt and self.continue_final_message:
            raise PydanticCustomError(
                "add_generation_prompt", "add_generation_prompt and continue_final_message exclude each other; send one"
            )
        return self

    def chat(self) -> ChatRequest:
        """The same messages as a request for an answer."""
        return ChatRequest.model_construct(None, **{name: getattr(self, name) for name in _CHAT_FIELDS})


class DetokenizeRequest(ModelFields):
    """POST /detokenize."""

    place = Place.TOKENIZE

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    """Token ids, as many as the model's context has."""


class PreparedTokens(msgspec.Struct, frozen=True, array_like=True):
    """What the answer has: packed ids (uint32 each) and their pieces, or the text of ids."""

    id: str
    ignored_fields: int
    packed_token_ids: bytes = b""
    pieces: list[str] | None = None
    text: str = ""
    parts: list[Part] = []


def prepare_tokenize(model: ServedModel, job: Job) -> PreparedTokens:
    """Raises InvalidRequest or UnknownModel."""
    fields, longest = parse_body(model, TokenizeRequest, job.body), job.facts.max_model_len
    text, param = fields.prompt or "", "prompt"
    if fields.messages is not None:
        chat, param = fields.chat(), "messages"
        chat.tool_use.check_size()
        text = model.tokenizer.render_chat(chat.messages_for_template(), longest, chat.variables(), chat.rendering())
    adds = fields.messages is None if fields.add_special_tokens is None else fields.add_special_tokens
    ids = model.tokenizer.encode(text, longest, add_special_tokens=adds, param=param)
    pieces = [model.tokenizer.find_piece(token_id) for token_id in ids] if fields.return_token_strs else None
    return PreparedTokens("tokenize", fields.ignored, array("I", ids).tobytes(), pieces)


def prepare_detokenize(model: ServedModel, job: Job) -> PreparedTokens:
    """Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, DetokenizeRequest, job.body)
    if fields.tokens:
        check_token_ids(fields.tokens, job.facts, "tokens")
    return PreparedTokens("detokenize", fields.ignored, text=model.tokenizer.decode(fields.tokens))
