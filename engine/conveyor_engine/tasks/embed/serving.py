"""POST /v1/embeddings and /embed."""

import base64
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from starlette.requests import Request

from conveyor_engine.serving.http.app_state import app_state, model_facts
from conveyor_engine.serving.http.engine_response import Opened, open_request
from conveyor_engine.serving.http.one_step import OneStepResponse, PromptUsage, write_list, write_with
from conveyor_engine.serving.http.task_paths import TaskPath, TaskPaths
from conveyor_engine.serving.preparing.schemas import EmbeddingRequest
from conveyor_engine.tasks.embed.bodies import EmbedRequest
from conveyor_engine.tasks.embed.preparing import PreparedEmbeddings
from conveyor_engine.wire.embedding import EmbeddingFacts


class Embedding(msgspec.Struct):
    """The vector of one input: numbers, or their float32 bytes (little-endian) in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    """The whole answer, in the inputs' order."""

    data: list[Embedding]
    model: str
    usage: PromptUsage
    object: str = "list"


async def create_embeddings(request: Request) -> "EmbeddingsResponse":
    """Answers with a vector of each input. Each is an engine request of its own, so it shares batches with others."""
    sees = EmbeddingFacts.read(model_facts(app_state(request))).pictures is not None
    return EmbeddingsResponse(await open_request(request, "embedding_of_images" if sees else "embedding"))


class EmbeddingsResponse(OneStepResponse):
    """All vectors, or one error."""

    def __init__(self, opened: Opened) -> None:
        assert isinstance(opened.prepared, PreparedEmbeddings)
        super().__init__(opened, opened.prepared)
        self._prepared = opened.prepared

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        """The JSON of an EmbeddingList."""
        vectors = (Embedding(index, self._show(vector)) for index, vector in enumerate(payloads))
        return write_with(EmbeddingList([], self._state.model.name, self._sum_usage()), "data", vectors)

    def _show(self, vector: bytes) -> list[float] | str:
        return base64.b64encode(vector).decode() if self._prepared.as_base64 else array("f", vector).tolist()


async def embed(request: Request) -> "VectorsResponse":
    """Answers as text-embeddings-inference does: with the vectors alone."""
    return VectorsResponse(await open_request(request, "embed"))


class VectorsResponse(EmbeddingsResponse):
    """A list of vectors, or one error."""

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        return write_list(map(self._show, payloads))


TASK: Final = TaskPaths(
    (
        TaskPath("/v1/embeddings", create_embeddings, "Makes a vector of each input.", EmbeddingRequest, EmbeddingList),
        TaskPath("/embed", embed, "Makes a vector of each input.", EmbedRequest, list[list[float]]),
    ),
    inputs_bytes_max=4 * 2**20,  # half of what a gateway takes of one body by default
)
