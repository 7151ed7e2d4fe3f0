"""The paths of models that generate text."""

from typing import Any, Final

from conveyor_engine.serving.http.chat import ChatChunk, ChatCompletion, create_chat_completion
from conveyor_engine.serving.http.completions import Completion, create_completion
from conveyor_engine.serving.http.task_paths import TaskPath, TaskPaths
from conveyor_engine.serving.preparing.schemas import ChatMessage, ChatRequest, CompletionRequest, StreamOptions

Json = dict[str, Any]


def _refine(schemas: Json) -> None:
    schemas["ChatMessage"]["required"] = ["role", "content"]
    for name in ("ChatRequest", "CompletionRequest"):
        schemas[name]["allOf"] = [_needs("stream_options", {"type": "object"}, "stream")]
    schemas["ChatRequest"]["allOf"].append(_needs("top_logprobs", {"type": "integer", "minimum": 1}, "logprobs"))


def _needs(field: str, value: Json, other: str) -> Json:
    """`field`, if it has such a value, is allowed only when `other` is true."""
    return {
        "if": {"properties": {field: value}, "required": [field]},
        "then": {"properties": {other: {"const": True}}, "required": [other]},
    }


TASK: Final = TaskPaths(
    (
        TaskPath(
            "/v1/chat/completions", create_chat_completion, "Answers a conversation.",
            ChatRequest, ChatCompletion, ChatChunk,
        ),
        TaskPath("/v1/completions", create_completion, "Continues prompts.", CompletionRequest, Completion, Completion),
    ),
    objects=(ChatMessage, StreamOptions),
    refine=_refine,
)  # fmt: skip
