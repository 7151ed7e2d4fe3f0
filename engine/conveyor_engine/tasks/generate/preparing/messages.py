"""Converts bodies of Anthropic's Messages API to chat requests, so that both share template, tool parser and the rest.

Used by `tasks.generate` for two kinds of bodies. Runs in the workers of `process`. No I/O, no asyncio.
"""

from array import array
from typing import Any, Final

from conveyor_engine.serving.preparing.chat_schemas import ChatRequest
from conveyor_engine.serving.preparing.conversations import read_conversation
from conveyor_engine.serving.preparing.jobs import ServedModel, parse_body
from conveyor_engine.serving.preparing.schemas import ChoosingFields
from conveyor_engine.serving.preparing.tokens import PreparedTokens
from conveyor_engine.tasks.generate.preparing.messages_schemas import (
    CountTokensRequest,
    MessagesRequest,
    ThinkingEnabled,
)
from conveyor_engine.tasks.generate.preparing.prepare import PreparedText, prepare_conversation
from conveyor_engine.tasks.generate.preparing.translation import in_words_of
from conveyor_engine.wire.worker import Job

_WORDS: Final = {
    ".function.parameters": ".input_schema", "thinking_token_budget": "thinking.budget_tokens",
    "continue_final_message": "messages", "response_format": "output_config.format",
}  # fmt: skip


def prepare_messages(model: ServedModel, job: Job) -> PreparedText:
    """Prepare a body of /v1/messages. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, MessagesRequest, job.body)
    chat = _translate(
        fields,
        **{name: getattr(fields, name) for name in ChoosingFields.model_fields},
        response_format=next(iter(CountTokensRequest.own_forms(fields).values()), None),
        max_tokens=fields.max_tokens,
        stop=fields.stop_sequences,
        thinking_token_budget=_find_budget(model, fields),
    )
    with in_words_of(_WORDS):
        return prepare_conversation(model, chat, job, "msg_", ignored_fields=fields.ignored)


def _find_budget(model: ServedModel, fields: MessagesRequest) -> int | None:
    """Return the most tokens of thinking; None: no limit, or the model does not think.

    Agents send a budget to every model, so a model that does not think ignores it.
    """
    thinking = fields.thinking if model.dialect.thinking else None
    return thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None


def prepare_count_tokens(model: ServedModel, job: Job) -> PreparedTokens:
    """Prepare a body of /v1/messages/count_tokens. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, CountTokensRequest, job.body)
    with in_words_of(_WORDS):
        chat = _translate(fields)
        ids = read_conversation(model, chat, job.facts).token_ids
    return PreparedTokens("count_tokens", fields.ignored, array("I", ids).tobytes())


def _translate(fields: CountTokensRequest, **others: Any) -> ChatRequest:
    """Return the body as a chat request.

    If the last message is the assistant's, has text and calls no tool, the answer continues it.
    """
    messages, use = fields.conversation(), fields.tool_use
    last = messages[-1]
    continues = last["role"] == "assistant" and "tool_calls" not in last and bool(last["content"].strip())
    chat = ChatRequest.model_construct(
        None, messages=messages, continue_final_message=continues, chat_template_kwargs=fields.variables(), **others
    )
    chat.tool_use = use  # validated with the body
    return chat
