"""The base of tables of error responses: an enum of codes, each with its HTTP status and its meaning.

Made by the errors of gateway, metrics server and engine; docs/errors.md is written from theirs. Errors have OpenAI's
form, on the paths of Anthropic's API its form, and on those of the Open Inference Protocol the protocol's.
"""

from enum import StrEnum
from typing import Final, Literal, Self, TypedDict

ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]


class AnswerCode(StrEnum):
    """The code as it stands in the answer; `meaning` is for whoever gets it."""

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


_PATHS: Final = ("/v1/messages", "/v1/messages/count_tokens")

AnthropicErrorType = Literal[
    "invalid_request_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
    "api_error",
]
_TYPES: Final[dict[int, AnthropicErrorType]] = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetails(TypedDict):
    """What is wrong; `code` and `param` are as in OpenAI's form."""

    type: AnthropicErrorType
    message: str
    param: str | None
    code: str


class AnthropicErrorAnswer(TypedDict):
    """The body of an error, and the last event of a stream that fails."""

    type: Literal["error"]
    error: AnthropicErrorDetails


def speaks_anthropic(path: str) -> bool:
    """Whether clients of this path, below any base URL, read Anthropic's form."""
    return path.endswith(_PATHS)


def build_anthropic_error(message: str, code: AnswerCode, param: str | None) -> AnthropicErrorAnswer:
    """The answer's body, as an object."""
    kind = _TYPES.get(code.status, "api_error" if code.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "param": param, "code": code}}


class InferenceErrorAnswer(TypedDict):
    """The Open Inference Protocol's form: `error` is a sentence. `code` and `param` are as in OpenAI's form."""

    error: str
    code: str
    param: str | None


def speaks_open_inference(path: str) -> bool:
    """Whether clients of this path, below any base URL, read the form of the Open Inference Protocol."""
    return path.endswith("/v2") or "/v2/models/" in path or "/v2/health/" in path


def build_inference_error(message: str, code: AnswerCode, param: str | None) -> InferenceErrorAnswer:
    """The answer's body, as an object."""
    return {"error": message, "code": code, "param": param}
