"""Messages between the API process and its workers: a job has a body, and the reply has engine requests or an error.

Used by `serving.preparing`: `pool` sends jobs, and `process` runs them.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Final, Self

import msgspec

from conveyor_engine.errors import ErrorCode, InvalidRequest, Overloaded, RequestError, Unavailable, UnknownModel
from conveyor_engine.wire.frames import encode_frame
from conveyor_engine.wire.messages import Add, prompt_key
from conveyor_engine.wire.request import EngineRequest, ModelFacts

_ERRORS: dict[str, type[RequestError]] = {
    kind.__name__: kind for kind in (InvalidRequest, UnknownModel, Overloaded, Unavailable)
}


INPUTS_MAX: Final = 8192  # maximum in a body, if each takes one step; OpenAI allows 2048, Cohere 10,000 documents


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Engine requests of one HTTP request that the engine accepts together, or not at all."""

    num_tokens_of: dict[str, int]  # by request id: memory in the engine, in units of one token (4 bytes)
    add: bytes  # the encoded message for the engine; the API process never decodes prompts
    adapter: int = 0

    @classmethod
    def of(cls, requests: Sequence[EngineRequest], grammar_bytes: int = 0) -> Self:
        """Make a part of these requests.

        grammar_bytes: size of the grammar that they share. It is counted for the first request only, and so is the
        prediction that they share.
        """
        sizes = {each.request_id: len(each.prompt_token_ids) for each in requests}
        for _, choices in groupby(requests, prompt_key):  # one payload is sent for the choices of a prompt
            first = next(choices)
            sizes[first.request_id] += len(first.payload) // 4
        sizes[requests[0].request_id] += grammar_bytes // 4 + len(requests[0].prediction)
        return cls(sizes, encode_frame(Add.of(requests)), requests[0].adapter)

    @classmethod
    def split(cls, requests: Sequence[EngineRequest], size: int) -> list[Self]:
        """Return parts of at most `size` requests, in their order."""
        return [cls.of(requests[start : start + size]) for start in range(0, len(requests), size)]


class ServedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that requests may select."""

    number: int  # in the engine process; 0: it is not loaded
    directory: str


class Job(msgspec.Struct, array_like=True):
    """One body, and what a worker needs to validate it in addition to the model's files."""

    kind: str
    facts: ModelFacts
    num_requests_max: int  # limit of the engine for a body whose requests form one part
    arrival_time: float
    body: bytes
    level: int | None = None  # None: the body's `priority`
    deadline: float = math.inf  # in the same clock as the arrival time
    json_bytes: int | None = None  # number of bytes at the body's beginning that are JSON; None: all
    content_type: str = ""  # the body's content type from the header
    adapters: dict[str, ServedAdapter] = {}  # by name
    fetched: dict[str, bytes] = {}  # files that the body names by URL

    @property
    def num_bytes(self) -> int:
        """The bytes that a client chose."""
        return len(self.body) + sum(map(len, self.fetched.values()))

    def find_level(self, priority: int | None) -> int:
        """Return the level of the body's requests. A gateway's level takes precedence over the client's `priority`."""
        return (priority or 0) if self.level is None else self.level


class Failure(msgspec.Struct, tag=True, array_like=True):
    """An error of `errors`."""

    kind: str
    message: str
    param: str | None
    code: ErrorCode
    model: str = ""  # of UnknownModel

    @classmethod
    def of(cls, error: RequestError) -> Self:
        model = error.model if isinstance(error, UnknownModel) else ""
        return cls(type(error).__name__, str(error), error.param, error.code, model)

    def error(self) -> RequestError:
        kind = _ERRORS[self.kind]
        if issubclass(kind, UnknownModel):
            return kind(self.message, param=self.param, model=self.model)
        if issubclass(kind, InvalidRequest):
            return kind(self.message, param=self.param, code=self.code)
        return kind(self.message)


class Bug(msgspec.Struct, tag=True, array_like=True):
    """An unexpected exception."""

    what: str


class Wanted(msgspec.Struct, tag=True, array_like=True):
    """The body names files by URL. The API process fetches them, and sends the job again with `fetched`."""

    names: dict[str, str]  # of the files in errors, by URL


class Started(msgspec.Struct, tag=True, array_like=True):
    """The first message of a worker."""

    pid: int


class Reply(msgspec.Struct, tag=True, array_like=True):
    """The result of a job: an error, or what the job prepares, encoded. `retires`: the worker exits after it."""

    result: bytes | Failure | Bug | Wanted
    retires: bool = False


job_decoder = msgspec.msgpack.Decoder(Job)
from_worker_decoder = msgspec.msgpack.Decoder(Started | Reply)
