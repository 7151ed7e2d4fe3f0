"""The base of tables of error responses: an enum of codes, each with its HTTP status and its meaning.

Gateway, metrics server and engine define their tables with it, and docs/errors.md is generated from these tables.
Errors of gateway and engine have OpenAI's format, unless the path belongs to another API: Anthropic's, the Open
Inference Protocol, or text-embeddings-inference. Errors of the metrics server have Kubernetes' format.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal, Self, TypedDict

ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]


class AnswerCode(StrEnum):
    """The code in the response. `meaning` explains it to the client."""

    status: int
    meaning: str

    def __new__(cls, code: str, status: int, meaning: str) -> Self:
        made = str.__new__(cls, code)
        made._value_, made.status, made.meaning = code, status, meaning
        return made

    @property
    def type(self) -> ErrorType:
        """OpenAI's word for the kind of error."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class ErrorDetails(TypedDict):
    """An error in OpenAI's format."""

    message: str
    type: ErrorType
    param: str | None
    code: str


class ErrorAnswer(TypedDict):
    """The body of an error response, and the last event of a stream that fails."""

    error: ErrorDetails


def _build_openai_error(message: str, code: AnswerCode, param: str | None) -> ErrorAnswer:
    return {"error": {"message": message, "type": code.type, "param": param, "code": code}}


_PATHS: Final = ("/v1/messages", "/v1/messages/count_tokens")

AnthropicErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
    "api_error",
]
_TYPES: Final[dict[int, AnthropicErrorType]] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetails(TypedDict):
    """The error in Anthropic's format. `code` and `param` are those of OpenAI's format."""

    type: AnthropicErrorType
    message: str
    param: str | None
    code: str


class AnthropicErrorAnswer(TypedDict):
    """The body of an error, and the last event of a stream that fails."""

    type: Literal["error"]
    error: AnthropicErrorDetails


def _speaks_anthropic(path: str) -> bool:
    """Return whether clients of this path, under any base URL, expect Anthropic's format."""
    return path.endswith(_PATHS)


def _build_anthropic_error(message: str, code: AnswerCode, param: str | None) -> AnthropicErrorAnswer:
    kind = _TYPES.get(code.status, "api_error" if code.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "param": param, "code": code}}


class InferenceErrorAnswer(TypedDict):
    """An error in the Open Inference Protocol's format. `error` is a sentence; `code` and `param` are OpenAI's."""

    error: str
    code: str
    param: str | None


def _speaks_open_inference(path: str) -> bool:
    return path.endswith("/v2") or "/v2/models/" in path or "/v2/health/" in path


def _build_inference_error(message: str, code: AnswerCode, param: str | None) -> InferenceErrorAnswer:
    return {"error": message, "code": code, "param": param}


# /rerank and /tokenize are vLLM's paths too, so their errors have OpenAI's format.
_EMBEDDINGS_PATHS: Final = ("/embed", "/embed_sparse", "/embed_all", "/predict", "/decode", "/info")

EmbeddingsErrorType = Literal["Unhealthy", "Backend", "Overloaded", "Validation"]


class EmbeddingsErrorAnswer(TypedDict):
    """An error in the format of text-embeddings-inference. `code` and `param` are those of OpenAI's format."""

    error: str
    error_type: EmbeddingsErrorType
    code: str
    param: str | None


def _build_embeddings_error(message: str, code: AnswerCode, param: str | None) -> EmbeddingsErrorAnswer:
    kinds: dict[int, EmbeddingsErrorType] = {429: "Overloaded", 503: "Unhealthy"}
    kind = kinds.get(code.status, "Backend" if code.status >= 500 else "Validation")
    return {"error": message, "error_type": kind, "code": code, "param": param}


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The error format that clients of some paths expect."""

    answer: type
    """The TypedDict of the body."""
    build: Callable[[str, AnswerCode, str | None], Any]
    """(message, code, param) -> the body, as an object."""


_OPENAI: Final = ErrorForm(ErrorAnswer, _build_openai_error)
_ANTHROPIC: Final = ErrorForm(AnthropicErrorAnswer, _build_anthropic_error)
_OPEN_INFERENCE: Final = ErrorForm(InferenceErrorAnswer, _build_inference_error)
_EMBEDDINGS: Final = ErrorForm(EmbeddingsErrorAnswer, _build_embeddings_error)
ERROR_FORMS: Final = (_OPENAI, _ANTHROPIC, _OPEN_INFERENCE, _EMBEDDINGS)


def find_error_form(path: str) -> ErrorForm:
    """Return the error format for this path, under any base URL. All but a few paths have OpenAI's."""
    if _speaks_open_inference(path):
        return _OPEN_INFERENCE
    if _speaks_anthropic(path):
        return _ANTHROPIC
    return _EMBEDDINGS if path.endswith(_EMBEDDINGS_PATHS) else _OPENAI
