"""Serves the paths of models that generate text, and adds rules to their JSON Schemas."""

from collections.abc import Sequence
from typing import Any, Final

from conveyor_engine.serving.http.task_paths import TaskPath, TaskPaths
from conveyor_engine.serving.http.tokens import TOKEN_PATHS
from conveyor_engine.serving.preparing.chat_schemas import EMPTY_ROLES, ChatMessage, ChatRequest
from conveyor_engine.serving.preparing.completion_schemas import CompletionRequest
from conveyor_engine.serving.preparing.costly_forms import FORM_FIELDS
from conveyor_engine.serving.preparing.schemas import StreamOptions
from conveyor_engine.serving.preparing.values import TOP_LOGPROBS_MAX
from conveyor_engine.tasks.generate.preparing.messages_schemas import CountTokensRequest, MessagesRequest
from conveyor_engine.tasks.generate.preparing.responses_schemas import ResponsesRequest
from conveyor_engine.tasks.generate.serving.chat import ChatChunk, ChatCompletion, create_chat_completion
from conveyor_engine.tasks.generate.serving.completions import Completion, create_completion
from conveyor_engine.tasks.generate.serving.messages import EVENTS as MESSAGE_EVENTS
from conveyor_engine.tasks.generate.serving.messages import (
    AnthropicMessage,
    TokenCount,
    count_message_tokens,
    create_message,
)
from conveyor_engine.tasks.generate.serving.responses import create_response
from conveyor_engine.tasks.generate.serving.responses_events import EVENTS as RESPONSE_EVENTS
from conveyor_engine.tasks.generate.serving.responses_events import Response

Json = dict[str, Any]


def _refine(schemas: Json) -> None:
    schemas["ChatMessage"]["anyOf"] = [
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
        {"properties": {"role": {"enum": list(EMPTY_ROLES)}}},
    ]
    outside_answers = {"items": {"properties": {"type": {"enum": ["text", "image_url"]}}}}
    schemas["ChatMessage"] |= {
        "if": {"properties": {"role": {"const": "assistant"}}},
        "else": {"properties": {"content": outside_answers}},
    }
    for name in ("ChatRequest", "CompletionRequest"):
        schemas[name]["allOf"] = [
            _needs("stream_options", {"type": "object"}, "stream"),
            _needs("prompt_logprobs", {"type": "integer"}, "stream", [False, None], absent=True),
        ]
    chat, completion = schemas["ChatRequest"]["allOf"], schemas["CompletionRequest"]["allOf"]
    chat.append(_needs("top_logprobs", {"type": "integer", "minimum": 1}, "logprobs"))
    chat.append(_needs("logprob_token_ids", {"type": "array"}, "logprobs"))
    completion.append(_needs("logprob_token_ids", {"type": "array"}, "logprobs", list(range(TOP_LOGPROBS_MAX + 1))))
    forced = {"not": {"enum": [None, "none", "auto"]}}
    completion.append(_needs("max_tokens", {"const": 0}, "echo"))
    chat.append(_calls_fit(forced, _has_type("function", "custom"), _NO_FORMS))
    must = {"type": "object", "properties": {"type": {"enum": ["any", "tool"]}}}
    schemas["ResponsesRequest"]["allOf"] = [
        _needs("stream_options", {"type": "object"}, "stream"),
        _calls_fit(forced, _has_type("function", "custom", "namespace"), _NO_FORMS),
    ]
    for name, no_forms in (("MessagesRequest", _NO_FORMS), ("CountTokensRequest", {})):
        schemas[name]["allOf"] = [_calls_fit(must, {"properties": {"type": {"enum": [None, "custom"]}}}, no_forms)]
    begins = _needs("continue_final_message", {"const": True}, "add_generation_prompt", [False, None], absent=True)
    chat.append(begins)
    either = [("prompt", ["string"]), ("messages", ["array"]), ("inputs", ["string", "array"])]
    one = {"oneOf": [{"properties": {name: {"type": kinds}}, "required": [name]} for name, kinds in either]}
    schemas["TokenizeRequest"]["allOf"] = [one, begins]


_NO_FORMS: Final = {name: {"type": "null"} for name in FORM_FIELDS}


def _has_type(*types: str) -> Json:
    return {"properties": {"type": {"enum": list(types)}}, "required": ["type"]}


def _calls_fit(must: Json, shown: Json, no_forms: Json) -> Json:
    """Return the rule for a required call.

    If `tool_choice` matches `must`, forms are not allowed, and some of the tools matches `shown`: the model sees it.
    """
    some = {"type": "array", "contains": shown}
    return {
        "if": {"properties": {"tool_choice": must}, "required": ["tool_choice"]},
        "then": {"properties": {"tools": some, **no_forms}, "required": ["tools"]},
    }


def _needs(field: str, value: Json, other: str, allowed: Sequence[object] = (True,), *, absent: bool = False) -> Json:
    """Return the rule that `field` may match `value` only if `other` has an allowed value.

    absent: whether `other` may also be absent.
    """
    return {
        "if": {"properties": {field: value}, "required": [field]},
        "then": {"properties": {other: {"enum": list(allowed)}}, "required": [] if absent else [other]},
    }


TASK: Final = TaskPaths(
    (
        TaskPath(
            "/v1/chat/completions", create_chat_completion, "Answers a conversation.",
            ChatRequest, ChatCompletion, ChatChunk,
        ),
        TaskPath("/v1/completions", create_completion, "Continues prompts.", CompletionRequest, Completion, Completion),
        TaskPath(
            "/v1/responses", create_response, "Answers input items, in the shape of OpenAI's Responses API.",
            ResponsesRequest, Response, events=RESPONSE_EVENTS,
        ),
        TaskPath(
            "/v1/messages", create_message, "Answers a conversation, in Anthropic's shape.",
            MessagesRequest, AnthropicMessage, events=MESSAGE_EVENTS,
        ),
        TaskPath(
            "/v1/messages/count_tokens", count_message_tokens, "Counts the tokens of a conversation.",
            CountTokensRequest, TokenCount,
        ),
        *TOKEN_PATHS,
    ),
    objects=(ChatMessage, StreamOptions),
    refine=_refine,
)  # fmt: skip
