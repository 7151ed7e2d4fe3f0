"""The messages between the API process and the engine process, which `frames` sends on one stream socket.

Used by `serving.engine_process` (asyncio) and `loop.process` (blocking).
"""

from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Self

import msgspec

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ErrorCode
from conveyor_engine.wire.pictures import PictureSpan
from conveyor_engine.wire.request import EngineRequest, EngineStats, ModelFacts, RequestOutput, SamplingParams, Thinking
from conveyor_protocol.failure_reasons import FailureReason


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


class LoadModel(_Message):
    """The first message: load this model."""

    config: EngineConfig


class Prompt(msgspec.Struct, array_like=True):
    """One prompt, which has tokens, a payload or both, and its choices. A choice is a request id and sampling
    parameters."""

    packed_token_ids: bytes  # uint32 each; lists of numbers would take ten times the memory while they wait
    payload: bytes
    payload_cost: int
    cache_salt: str | None
    choices: list[tuple[str, SamplingParams | None]]
    num_steps: int = 1
    group: int = 0
    pictures: tuple[PictureSpan, ...] = ()


class Add(_Message):
    """Adds requests of one HTTP request: all of them or none.

    If an HTTP request has many inputs, they are sent in several of these messages, with the same party. A prompt is
    sent once, even if it has many choices.
    """

    prompts: list[Prompt]
    party: str
    level: int
    deadline: float
    grammar: str = ""  # the grammar that the answers of all these requests follow; empty: none
    thinking: Thinking | None = None  # as in `EngineRequest`, for all these requests
    adapter: int = 0  # the same
    packed_prediction: bytes = b""  # the same, as uint32

    @property
    def request_ids(self) -> list[str]:
        """Return the ids of all its requests."""
        return [request_id for prompt in self.prompts for request_id, _ in prompt.choices]

    @classmethod
    def of(cls, requests: Sequence[EngineRequest]) -> Self:
        """Make the message. Consecutive requests with the same prompt objects become choices of one prompt."""
        groups = [list(group) for _, group in groupby(requests, prompt_key)]
        return cls(
            [
                Prompt(
                    array("I", group[0].prompt_token_ids).tobytes(),
                    group[0].payload,
                    group[0].payload_cost,
                    group[0].cache_salt,
                    [(request.request_id, request.params) for request in group],
                    group[0].num_steps,
                    group[0].group,
                    tuple(group[0].pictures),
                )
                for group in groups
            ],
            requests[0].party or requests[0].request_id,
            requests[0].level,
            requests[0].deadline,
            requests[0].grammar,
            requests[0].thinking,
            requests[0].adapter,
            array("I", requests[0].prediction).tobytes(),
        )

    def requests(self, now: float) -> list[EngineRequest]:
        """Return the requests from which `of` made this message, as one party.

        Their arrival time is `now`, because they could not run earlier.
        """
        requests = []
        prediction = array("I", self.packed_prediction) or ()
        for prompt in self.prompts:
            token_ids = array("I", prompt.packed_token_ids)
            hashes: list[bytes] = []
            requests += [
                EngineRequest(
                    request_id=request_id,
                    party=self.party,
                    prompt_token_ids=token_ids,
                    payload=prompt.payload,
                    payload_cost=prompt.payload_cost,
                    num_steps=prompt.num_steps,
                    group=prompt.group,
                    pictures=prompt.pictures,
                    params=params,
                    grammar=self.grammar,
                    thinking=self.thinking,
                    level=self.level,
                    deadline=self.deadline,
                    arrival_time=now,
                    cache_salt=prompt.cache_salt,
                    adapter=self.adapter,
                    prediction=prediction,
                    prompt_hashes=hashes,
                )
                for request_id, params in prompt.choices
            ]
        return requests


def prompt_key(request: EngineRequest) -> tuple[int, int, int]:
    """Return what choices of one prompt have in common: they share these objects."""
    return id(request.prompt_token_ids), id(request.payload), request.payload_cost


class Abort(_Message):
    """End these requests now."""

    request_ids: list[str]


class Drain(_Message):
    """No more requests will come."""


class LoadAdapter(_Message):
    """Load an adapter under a number that no adapter has had. The answer is AdapterLoaded or AdapterFailed.

    If no slot is free, the adapter is only read, and loaded when requests wait for it.
    """

    number: int
    name: str
    directory: str


class UnloadAdapter(_Message):
    """Take no more requests for this adapter, and free its memory after the last one."""

    number: int


ToEngine = LoadModel | Add | Abort | Drain | LoadAdapter | UnloadAdapter


class LoadingLine(_Message):
    """One key=value line about loading."""

    line: str


class Ready(_Message):
    """The model is loaded and warmed up."""

    facts: ModelFacts
    longest_warmup_step_seconds: float
    warmup_seconds: float = 0.0


class StartFailed(_Message):
    """The engine cannot start; it exits after this."""

    reason: FailureReason
    message: str


class Refused(_Message):
    """Rejects all of these requests."""

    request_ids: list[str]
    message: str
    overloaded: bool  # if false, the request itself is invalid
    param: str | None
    code: ErrorCode


class AdapterLoaded(_Message):
    """Requests may have this adapter from now on."""

    number: int


class AdapterFailed(_Message):
    """The adapter cannot be loaded, now or again. Nothing else has changed."""

    number: int
    reason: FailureReason
    message: str


class StepOutputs(_Message):
    """The outputs of one step. `num_added`: number of requests added since the start; `stats` covers all of them."""

    outputs: list[RequestOutput]
    stats: EngineStats
    num_added: int


class Heartbeat(_Message):
    """Sent every second from its own thread while the process lives. `step_seconds`: age of the current step."""

    step_seconds: float


class Failed(_Message):
    """The engine loop broke; the process exits after this."""

    reason: FailureReason
    message: str


FromEngine = (
    LoadingLine | Ready | StartFailed | Refused | AdapterLoaded | AdapterFailed | StepOutputs | Heartbeat | Failed
)

to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)
