"""What a table of error answers is: an enum of codes, each with its HTTP status and its meaning.

Made by the errors of gateway, metrics server and engine; docs/errors.md is written from theirs.
"""

from enum import StrEnum
from typing import Literal, Self

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
