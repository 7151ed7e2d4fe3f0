"""POST /v1/embeddings."""

import base64
import time
from array import array
from collections.abc import Iterator

import msgspec
from starlette.requests import Request
from starlette.types import Send

from conveyor_engine.serving.http.engine_response import EngineResponse, Opened, open_request
from conveyor_engine.serving.http.failures import find_failure
from conveyor_engine.serving.http.formats import encode
from conveyor_engine.serving.http.usage import UsedTokens
from conveyor_engine.serving.preparing.prepare_embeddings import PreparedEmbeddings
from conveyor_engine.wire.request import FinishReason, RequestOutput, Task


class Embedding(msgspec.Struct):
    """The vector of one input: numbers, or their float32 bytes (little-endian) in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """The whole answer, in the inputs' order."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


async def create_embeddings(request: Request) -> "EmbeddingsResponse":
    """Answers with a vector of each input. Each is an engine request of its own, so it shares batches with others."""
    return EmbeddingsResponse(await open_request(request, "embedding", Task.EMBED))


class EmbeddingsResponse(EngineResponse):
    """All vectors, or one error."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        assert isinstance(opened.prepared, PreparedEmbeddings)
        self._prepared = opened.prepared
        self._sent = time.monotonic()
        self._vectors: dict[str, bytes] = {}
        self._open = set(self._prepared.request_ids)

    async def _answer(self, send: Send) -> None:
        for num_tokens in self._prepared.nums_prompt_tokens:
            self._state.metrics.observe_prompt(num_tokens)
        async for outputs in self._generation.batches():
            for output in outputs:
                self._take(output)
        await self._send_json(self._pieces(), send)

    def _take(self, output: RequestOutput) -> None:
        """Raises DeadlineExceeded or GenerationFailed."""
        assert output.finish_reason is not None
        self._end(output.request_id, output.finish_reason)
        if (failure := find_failure(output)) is not None:
            raise failure
        assert output.vector is not None
        queued, computed = output.scheduled_time - self._sent, time.monotonic() - output.scheduled_time
        self._state.metrics.observe_stages(max(0.0, queued), computed, 0.0, output.num_preemptions)
        self._vectors[output.request_id] = output.vector
        self._held.grow(len(output.vector))

    def _count_used(self) -> UsedTokens:
        nums = zip(self._prepared.request_ids, self._prepared.nums_prompt_tokens, strict=True)
        return UsedTokens(prompt_tokens=sum(num for request_id, num in nums if request_id in self._vectors))

    def _leave(self) -> None:
        for request_id in list(self._open):
            self._end(request_id, FinishReason.ABORT)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        self._open.discard(request_id)
        self._state.metrics.observe_end(reason.value, 0, time.monotonic() - self._prepared.arrival_time, 0.0)

    def _pieces(self) -> Iterator[bytes]:
        """The JSON of an EmbeddingList."""
        num_tokens = sum(self._prepared.nums_prompt_tokens)
        whole = EmbeddingList([], self._state.model_name, EmbeddingUsage(num_tokens, num_tokens))
        begin, end = encode(whole).split(b'"data":[]')
        yield begin + b'"data":['
        for index, request_id in enumerate(self._prepared.request_ids):
            yield (b"," if index else b"") + encode(Embedding(index, self._show(self._vectors[request_id])))
        yield b"]" + end

    def _show(self, vector: bytes) -> list[float] | str:
        return base64.b64encode(vector).decode() if self._prepared.as_base64 else array("f", vector).tolist()
