"""The form of each task, and the request that it becomes. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import msgspec

from conveyor_console.playground.api_requests import ApiRequest
from conveyor_console.playground.fields import Field, InvalidForm, Sent

_MESSAGE: Final = Field("message", "Message", "text", "Tell me a short story.", attributes={"rows": "5"})
_MAX_TOKENS: Final = Field("max_tokens", "Most tokens", "number", "256", attributes={"min": "1", "step": "1"})
_TEMPERATURE: Final = Field(
    "temperature", "Temperature", "number", hint="Empty: the model's own", attributes={"min": "0", "step": "any"}
)
_TEXTS: Final = Field(
    "texts",
    "Texts, one on each line",
    "text",
    "A dog runs.\nA puppy is running.\nThe rate rose.",
    attributes={"rows": "6"},
)
_QUERY: Final = Field("query", "Query", "line", "How do I use dictionaries?")
_DOCUMENTS: Final = Field(
    "documents",
    "Documents, one on each line",
    "text",
    "The assert statement checks a condition.\nA dictionary maps keys to values.\nLists are mutable sequences.",
    attributes={"rows": "6"},
)
_IMAGE: Final = Field(
    "file", "Picture", "file", "picture.png", attributes={"accept": "image/jpeg,image/png,image/webp,image/gif"}
)
_AUDIO: Final = Field("file", "Recording", "file", "recording.mp3", attributes={"accept": "audio/*"})
_LANGUAGE: Final = Field("language", "Language", "line", hint="Such as de. Empty: the model detects it")
_PROMPT: Final = Field("prompt", "Picture of", "text", "a red circle", attributes={"rows": "3"})
_SIZE: Final = Field("size", "Size", "line", hint="Such as 512x512. Empty: the model's own")
_STEPS: Final = Field("steps", "Steps", "number", "20", attributes={"min": "1", "step": "1"})
_SEED: Final = Field("seed", "Seed", "number", hint="Empty: random", attributes={"step": "1"})
_TENSORS: Final = Field(
    "inputs",
    "Inputs of the Open Inference Protocol, as JSON",
    "text",
    '[{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]',
    attributes={"rows": "8", "spellcheck": "false"},
)


@dataclass(frozen=True, slots=True)
class TaskForm:
    """The fields, and the function that returns the request from what was sent and the model's name.

    The function raises InvalidForm.
    """

    fields: Sequence[Field]
    build: Callable[[Sent, str], ApiRequest]


def _build_chat(sent: Sent, _model: str) -> ApiRequest:
    message = sent.require(_MESSAGE)
    settings = _drop_empty(max_tokens=sent.find_number(_MAX_TOKENS), temperature=sent.find_number(_TEMPERATURE))
    settings |= {"stream": True, "stream_options": {"include_usage": True}}
    if sent.find("api") == "completions":
        return ApiRequest("/v1/completions", "events", {"prompt": message, **settings})
    system, turns = sent.find("system"), sent.list_all("turn")
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]
    messages.append({"role": "user", "content": message})
    return ApiRequest("/v1/chat/completions", "events", {"messages": messages, **settings}, message=message)


def _build_embeddings(sent: Sent, _model: str) -> ApiRequest:
    texts = sent.list_lines(_TEXTS)
    return ApiRequest("/v1/embeddings", "embeddings", {"input": texts}, inputs=texts)


def _build_ranking(sent: Sent, _model: str) -> ApiRequest:
    documents = sent.list_lines(_DOCUMENTS)
    body = {"query": sent.require(_QUERY), "documents": documents}
    return ApiRequest("/v1/rerank", "ranking", body, inputs=documents)


def _build_labels(sent: Sent, _model: str) -> ApiRequest:
    texts = sent.list_lines(_TEXTS)
    return ApiRequest("/classify", "labels", {"input": texts}, inputs=texts)


def _build_image_labels(sent: Sent, _model: str) -> ApiRequest:
    upload = sent.require_upload(_IMAGE)
    path = "/v1/images/classify"
    return ApiRequest(path, "image labels", parts=[("top_k", "5")], file_part="image", upload=upload)


def _build_transcript(sent: Sent, _model: str) -> ApiRequest:
    upload, language = sent.require_upload(_AUDIO), sent.find("language")
    parts = [("stream", "true"), *([("language", language)] if language else [])]
    return ApiRequest("/v1/audio/transcriptions", "events", parts=parts, file_part="file", upload=upload)


def _build_picture(sent: Sent, _model: str) -> ApiRequest:
    body = {"prompt": sent.require(_PROMPT)} | _drop_empty(
        size=sent.find("size"), num_inference_steps=sent.find_number(_STEPS), seed=sent.find_number(_SEED)
    )
    return ApiRequest("/v1/images/generations", "pictures", body)


def _build_inference(sent: Sent, model: str) -> ApiRequest:
    try:
        inputs = msgspec.json.decode(sent.require(_TENSORS))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidForm(f"The inputs are not JSON: {error}.") from None
    return ApiRequest(f"/v2/models/{quote(model, safe='')}/infer", "tensors", {"inputs": inputs})


def _drop_empty(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, "")}


TASKS: Final[Mapping[str, TaskForm]] = {
    "Generate": TaskForm(
        (
            _MESSAGE,
            Field("system", "System message", "text", attributes={"rows": "2"}),
            _MAX_TOKENS,
            _TEMPERATURE,
            Field("api", "API", "choice", "chat", choices=(("chat", "Chat"), ("completions", "Completion of a text"))),
        ),
        _build_chat,
    ),
    "Embed": TaskForm((_TEXTS,), _build_embeddings),
    "Rerank": TaskForm((_QUERY, _DOCUMENTS), _build_ranking),
    "Classify": TaskForm((_TEXTS,), _build_labels),
    "ImageClassify": TaskForm((_IMAGE,), _build_image_labels),
    "Transcribe": TaskForm((_AUDIO, _LANGUAGE), _build_transcript),
    "ImageGenerate": TaskForm((_PROMPT, _SIZE, _STEPS, _SEED), _build_picture),
    "Custom": TaskForm((_TENSORS,), _build_inference),
}
KEY: Final = Field(
    "key",
    "API key",
    hint="Only for services that need one. It is sent with this request and not stored",
    attributes={"autocomplete": "off", "spellcheck": "false"},
)
