"""Responses to requests with a list of inputs. They contain the results of all inputs, or one error.

The engine returns one payload for each input.
"""

import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Send

from conveyor_engine.errors import DeadlineExceeded, GenerationFailed, RequestError
from conveyor_engine.serving.http.engine_response import EngineResponse, Opened
from conveyor_engine.serving.http.events import encode
from conveyor_engine.serving.http.failures import find_failure
from conveyor_engine.serving.http.receipts import Receipt
from conveyor_engine.serving.preparing.jobs import name_input
from conveyor_engine.wire.request import FinishReason, RequestOutput
from conveyor_protocol.usage import UsedTokens

_BASE64_BYTES: Final = 3 * 2**13  # encoded at once; a multiple of 3, so that only the last piece is padded
_INPUT_BYTES = 1024  # roughly what this process keeps for an input besides its prompt and payload


class PreparedInputs(Protocol):
    """The facts about a request that its response needs, in the inputs' order."""

    @property
    def request_ids(self) -> Sequence[str]: ...

    @property
    def nums_prompt_tokens(self) -> Sequence[int]: ...

    @property
    def arrival_time(self) -> float: ...

    @property
    def param(self) -> str:
        """The name of the request's field with the inputs."""
        ...


class PromptUsage(msgspec.Struct):
    """Token counts, summed over all inputs."""

    prompt_tokens: int
    total_tokens: int
    receipt: Receipt | UnsetType = UNSET


class OneStepResponse(EngineResponse):
    """Collects the payload of each input. A subclass turns the payloads into the answer."""

    def __init__(self, opened: Opened, prepared: PreparedInputs) -> None:
        super().__init__(opened)
        self._inputs = prepared
        self._payloads: dict[str, bytes] = {}
        self._open = set(prepared.request_ids)

    def _sum_usage(self) -> PromptUsage:
        num_tokens = sum(self._inputs.nums_prompt_tokens)
        return PromptUsage(num_tokens, num_tokens, self._find_receipt())

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        """Yield the JSON of the answer. `payloads`: one for each input, in their order."""
        raise NotImplementedError

    async def _send_payloads(self, payloads: Sequence[bytes], send: Send) -> None:
        """Send the answer as JSON. A subclass whose answers are not always JSON overrides this."""
        await self._send_json(self._pieces(payloads), send)

    async def _send_answer(self, send: Send) -> None:
        self._observe_prompts()
        async for outputs in self._generation.batches():
            for output in outputs:
                self._add(output)
        taken, self._payloads = self._payloads, dict.fromkeys(self._payloads, b"")  # so that they can be freed
        await self._send_payloads([taken.pop(i) for i in self._inputs.request_ids], send)

    def _observe_prompts(self) -> None:
        self._held.grow(_INPUT_BYTES * len(self._inputs.request_ids))
        for num_tokens in self._inputs.nums_prompt_tokens:
            self._state.metrics.observe_prompt(num_tokens)

    def _add(self, output: RequestOutput) -> None:
        """Add the payload of one input. Raises DeadlineExceeded or GenerationFailed."""
        assert output.finish_reason is not None
        self._end(output.request_id, output.finish_reason)
        if (failure := find_failure(output)) is not None:
            raise self._name_input(failure, output.request_id)
        assert output.payload is not None
        queued, computed = output.scheduled_time - self._generation.opened_at, time.monotonic() - output.scheduled_time
        self._state.metrics.observe_stages(max(0.0, queued), computed, 0.0, output.num_preemptions)
        self._payloads[output.request_id] = output.payload
        self._held.grow(len(output.payload))

    def _name_input(self, failure: RequestError, request_id: str) -> RequestError:
        """Return the failure with the name of its input if there are several. A deadline belongs to all inputs."""
        ids = self._inputs.request_ids
        if isinstance(failure, DeadlineExceeded) or len(ids) == 1:
            return failure
        return GenerationFailed(f"{name_input(self._inputs.param, list(ids).index(request_id), len(ids))}: {failure}")

    def _count_used(self) -> UsedTokens:
        nums = zip(self._inputs.request_ids, self._inputs.nums_prompt_tokens, strict=True)
        return UsedTokens(sum(num for request_id, num in nums if request_id in self._payloads), 0, 0)

    def _leave(self) -> None:
        for request_id in list(self._open):
            self._end(request_id, FinishReason.ABORT)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        self._open.discard(request_id)
        self._state.metrics.observe_end(reason.value, 0, time.monotonic() - self._inputs.arrival_time, 0.0)


def write_list(items: Iterable[object]) -> Iterator[bytes]:
    """Yield the JSON of a list in pieces, so that it is never whole in memory."""
    yield b"["
    for number, item in enumerate(items):
        yield (b"," if number else b"") + encode(item)
    yield b"]"


def write_nested(lists: Iterable[Iterable[object]]) -> Iterator[bytes]:
    """Yield the JSON of a list of lists in pieces."""
    return _join(map(write_list, lists))


def write_with(whole: msgspec.Struct, field: str, items: Iterable[object]) -> Iterator[bytes]:
    """Yield the JSON of `whole` in pieces, with these items in its list `field`, which is empty in `whole`."""
    return _write_around(whole, field, write_list(items))


def write_pieces(whole: msgspec.Struct, field: str, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the same for items of which each is the pieces of its JSON."""
    return _write_around(whole, field, _join(items))


def write_base64(whole: msgspec.Struct, field: str, payload: bytes) -> Iterator[bytes]:
    """Yield the JSON of `whole` in pieces, with these bytes as base64 in `field`, which is empty in `whole`."""
    pieces = (b64encode(payload[begin : begin + _BASE64_BYTES]) for begin in range(0, len(payload), _BASE64_BYTES))
    return _write_around(whole, field, chain([b'"'], pieces, [b'"']), b'""')


def _write_around(whole: msgspec.Struct, field: str, written: Iterable[bytes], empty: bytes = b"[]") -> Iterator[bytes]:
    begin, end = encode(whole).split(f'"{field}":'.encode() + empty)
    yield begin + f'"{field}":'.encode()
    yield from written
    yield end


def _join(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the JSON of a list whose items are written in pieces."""
    yield b"["
    for number, pieces in enumerate(items):
        if number:
            yield b","
        yield from pieces
    yield b"]"
