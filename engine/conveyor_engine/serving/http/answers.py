"""The answers of the GET routes, and errors, as structs. Used by `status`, `failures` and `openapi`."""

from typing import Literal

import msgspec

from conveyor_engine.errors import ErrorCode
from conveyor_protocol.answer_codes import ErrorType


class ErrorDetails(msgspec.Struct):
    """OpenAI's form of an error."""

    message: str
    type: ErrorType
    param: str | None
    code: ErrorCode


class ErrorAnswer(msgspec.Struct):
    """The body of an error, and the last event of a stream that fails."""

    error: ErrorDetails


class Model(msgspec.Struct):
    """One model as OpenAI describes it, and its context as vLLM does."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(msgspec.Struct):
    """The models of this server: one."""

    object: Literal["list"]
    data: list[Model]


class Status(msgspec.Struct):
    """The engine's state."""

    status: Literal["starting", "ready", "draining", "dead", "stuck"]


class Version(msgspec.Struct):
    """As vLLM answers it."""

    version: str


class Load(msgspec.Struct):
    """How many requests run and wait, how many the KV cache carried at once if it was short lately, whether the engine
    drains, and how long it warmed up when it started. `server_load` is vLLM's name for all requests here."""

    server_load: int
    running: int
    waiting: int
    max_num_seqs: int
    kv_cache_usage: float
    carried: int | None
    draining: bool
    warm_up_seconds: float | None
