"""What the API process and its workers say to each other: a body as a job, engine requests or an error as the reply.

Used by `serving.preparing`: `pool` sends jobs, and `process` runs them.
"""

import math
from typing import Self

import msgspec

from conveyor_engine.errors import ConveyorEngineError, ErrorCode, InvalidRequest, Overloaded, Unavailable, UnknownModel
from conveyor_engine.wire.request import ModelFacts

_ERRORS: dict[str, type[ConveyorEngineError]] = {
    kind.__name__: kind for kind in (InvalidRequest, UnknownModel, Overloaded, Unavailable)
}


class Job(msgspec.Struct, array_like=True):
    """One body, and what it is checked against beside the model."""

    kind: str
    facts: ModelFacts
    num_requests_max: int  # that the engine ever takes at once
    arrival_time: float
    body: bytes
    level: int | None = None  # None: as the body's `priority` says
    deadline: float = math.inf  # in the same seconds as the arrival time

    def find_level(self, priority: int | None) -> int:
        """The level of the body's requests. A gateway's wins over the client's."""
        return (priority or 0) if self.level is None else self.level


class Failure(msgspec.Struct, tag=True, array_like=True):
    """An error of `errors`."""

    kind: str
    message: str
    param: str | None = None
    code: ErrorCode | None = None

    @classmethod
    def of(cls, error: ConveyorEngineError) -> Self:
        if isinstance(error, InvalidRequest):
            return cls(type(error).__name__, str(error), error.param, error.code)
        return cls(type(error).__name__, str(error))

    def error(self) -> ConveyorEngineError:
        kind = _ERRORS[self.kind]
        if issubclass(kind, InvalidRequest):
            return kind(self.message, param=self.param, code=self.code)
        return kind(self.message)


class Bug(msgspec.Struct, tag=True, array_like=True):
    """An unexpected exception."""

    what: str


class Started(msgspec.Struct, tag=True, array_like=True):
    """The first message of a worker."""

    pid: int


class Reply(msgspec.Struct, tag=True, array_like=True):
    """The result of a job: what its kind prepares, encoded, or an error. `retires`: the worker exits after it."""

    result: bytes | Failure | Bug
    retires: bool = False


job_decoder = msgspec.msgpack.Decoder(Job)
from_worker_decoder = msgspec.msgpack.Decoder(Started | Reply)
