"""Serves the paths of models that embed."""

import base64
import itertools
import operator
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.types import Send

from conveyor_engine.serving.http.app_state import app_state, model_facts
from conveyor_engine.serving.http.comparing import ComparisonResponse, build_comparison_paths
from conveyor_engine.serving.http.engine_response import Opened, open_request
from conveyor_engine.serving.http.events import encode
from conveyor_engine.serving.http.one_step import OneStepResponse, PromptUsage, write_list, write_with
from conveyor_engine.serving.http.task_paths import TaskPath, TaskPaths
from conveyor_engine.serving.http.tokens import TOKEN_PATHS
from conveyor_engine.serving.preparing.inputs import needs_inputs
from conveyor_engine.tasks.embed.bodies import EmbeddingRequest, EmbedRequest
from conveyor_engine.tasks.embed.facts import NUM_BYTES, EmbeddingFacts, EmbedDtype
from conveyor_engine.tasks.embed.preparing import PreparedCosines, PreparedEmbeddings
from conveyor_engine.wire.request import ModelFacts


class Embedding(msgspec.Struct):
    """The vector of one input: numbers, or their bytes in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    """The response with the vectors of all inputs, in their order."""

    data: list[Embedding]
    model: str
    usage: PromptUsage
    object: str = "list"


class VectorPlace(msgspec.Struct):
    """The position of one input's vector in a binary response, in vLLM's format."""

    index: int
    embed_dtype: EmbedDtype
    endianness: str
    start: int
    end: int
    shape: tuple[int]


class Metadata(msgspec.Struct):
    """The content of a binary response's header: the positions of its vectors, and the token counts."""

    id: str
    created: int
    model: str
    data: list[VectorPlace]
    usage: PromptUsage


async def create_embeddings(request: Request) -> "EmbeddingsResponse":
    """Return a vector for each input. Each input is a separate engine request, so it shares batches with others."""
    sees = EmbeddingFacts.read(model_facts(app_state(request))).pictures is not None
    return EmbeddingsResponse(await open_request(request, "embedding_of_images" if sees else "embedding"))


class EmbeddingsResponse(OneStepResponse):
    """Responds with all vectors, or with one error."""

    def __init__(self, opened: Opened) -> None:
        assert isinstance(opened.prepared, PreparedEmbeddings)
        super().__init__(opened, opened.prepared)
        self._prepared = opened.prepared

    async def _send_payloads(self, payloads: Sequence[bytes], send: Send) -> None:
        if not self._prepared.encoding.startswith("bytes"):
            await super()._send_payloads(payloads, send)
            return
        headers = [(b"content-type", b"application/octet-stream")]
        if self._prepared.encoding == "bytes":
            headers.append((b"metadata", encode(self._describe(payloads))))
        await self._send_body(iter(payloads), headers, send)

    def _describe(self, payloads: Sequence[bytes]) -> "Metadata":
        """Return the position of each input's vector in the body."""
        places, end = [], 0
        for index, vector in enumerate(payloads):
            begin, end = end, end + len(vector)
            shape = (len(vector) // NUM_BYTES[self._prepared.dtype],)
            places.append(VectorPlace(index, self._prepared.dtype, self._prepared.endianness, begin, end, shape))
        return Metadata(self._id, int(time.time()), self._state.model.name, places, self._sum_usage())

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        """Yield the JSON of an EmbeddingList."""
        vectors = (Embedding(index, self._show(vector)) for index, vector in enumerate(payloads))
        return write_with(EmbeddingList([], self._state.model.name, self._sum_usage()), "data", vectors)

    def _show(self, vector: bytes) -> list[float] | str:
        return base64.b64encode(vector).decode() if self._prepared.encoding == "base64" else array("f", vector).tolist()


async def embed(request: Request) -> "VectorsResponse":
    """Return only the vectors, as text-embeddings-inference does."""
    return VectorsResponse(await open_request(request, "embed"))


class VectorsResponse(EmbeddingsResponse):
    """Responds with a list of vectors, or with one error."""

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        return write_list(map(self._show, payloads))


class CosinesResponse(ComparisonResponse):
    """Scores each pair by the cosine of its two vectors, as vLLM does with a model that embeds."""

    def _score(self, payloads: Sequence[bytes]) -> list[float]:
        assert isinstance(self._comparison, PreparedCosines)
        vectors = [array("f", payload) for payload in payloads]
        first, second = vectors[: self._comparison.num_first], vectors[self._comparison.num_first :]
        firsts = itertools.repeat(first[0]) if len(first) == 1 else first
        return [sum(map(operator.mul, *pair)) for pair in zip(firsts, second, strict=False)]


def _describe_for_tei(facts: ModelFacts) -> dict[str, Any]:
    pooling = EmbeddingFacts.read(facts).pooling
    return {"embedding": {"pooling": "last_token" if pooling == "last" else pooling or "model"}}


TASK: Final = TaskPaths(
    (
        TaskPath(
            "/v1/embeddings", create_embeddings, "Makes a vector of each input.", EmbeddingRequest, EmbeddingList,
            is_bytes_too=True,
        ),
        TaskPath("/embed", embed, "Makes a vector of each input.", EmbedRequest, list[list[float]]),
        *build_comparison_paths(CosinesResponse),
        *TOKEN_PATHS,
    ),
    refine=lambda schemas: needs_inputs(schemas["EmbeddingRequest"]),
    describe_for_tei=_describe_for_tei,
    inputs_bytes_max=4 * 2**20,  # half of a gateway's default limit for a body
)  # fmt: skip
