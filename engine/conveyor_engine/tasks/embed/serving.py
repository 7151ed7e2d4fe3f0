"""Serves the paths of models that embed."""

import itertools
import operator
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.types import Send

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.http.app_state import app_state, model_facts
from conveyor_engine.serving.http.comparing import ComparisonResponse, build_comparison_paths
from conveyor_engine.serving.http.engine_response import Opened, open_request
from conveyor_engine.serving.http.events import encode
from conveyor_engine.serving.http.one_step import (
    OneStepResponse,
    PromptUsage,
    write_base64,
    write_list,
    write_nested,
    write_pieces,
    write_with,
)
from conveyor_engine.serving.http.task_paths import TaskPath, TaskPaths
from conveyor_engine.serving.http.tokens import TOKEN_PATHS
from conveyor_engine.serving.preparing.inputs import needs_inputs
from conveyor_engine.serving.preparing.jobs import name_input
from conveyor_engine.serving.preparing.prompts import RESULT_BYTES_MAX
from conveyor_engine.tasks.embed.bodies import (
    EmbedAllRequest,
    EmbeddingRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PoolingRequest,
)
from conveyor_engine.tasks.embed.facts import (
    NUM_BYTES,
    RESULT_MARK,
    SPARSE_NUMBERS_MAX,
    TOO_DENSE,
    EmbeddingFacts,
    EmbedDtype,
)
from conveyor_engine.tasks.embed.preparing import PreparedCosines, PreparedEmbeddings
from conveyor_engine.wire.request import ModelFacts, RequestOutput


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


class Pooled(msgspec.Struct):
    """The result for one input: numbers, a list of numbers for each token, or their bytes in base64."""

    index: int
    data: list[float | list[float]] | str
    object: str = "pooling"


class PooledList(msgspec.Struct):
    """The response with the results for all inputs, in their order."""

    id: str
    created: int
    model: str
    data: list[Pooled]
    usage: PromptUsage
    object: str = "list"


class SparseValue(msgspec.Struct):
    """A number of a sparse vector that is not zero. index: the token's id."""

    index: int
    value: float


class VectorPlace(msgspec.Struct):
    """The position of one input's vector in a binary response, in vLLM's format."""

    index: int
    embed_dtype: EmbedDtype
    endianness: str
    start: int
    end: int
    shape: list[int]


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
        self._num_bytes = 0  # of the payloads so far

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
            shape = self._find_shape(len(vector) // NUM_BYTES[self._prepared.dtype])
            places.append(VectorPlace(index, self._prepared.dtype, self._prepared.endianness, begin, end, shape))
        return Metadata(self._id, int(time.time()), self._state.model.name, places, self._sum_usage())

    def _find_shape(self, num_numbers: int) -> list[int]:
        """Return the shape of one input's numbers."""
        size = self._prepared.vector_size
        return [num_numbers // size, size] if size else [num_numbers]

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        """Yield the JSON of an EmbeddingList."""
        whole = EmbeddingList([], self._state.model.name, self._sum_usage())
        if self._prepared.encoding == "base64":
            written = (write_base64(Embedding(index, ""), "embedding", each) for index, each in enumerate(payloads))
            return write_pieces(whole, "data", written)
        return write_with(whole, "data", (Embedding(index, _read_floats(each)) for index, each in enumerate(payloads)))


async def create_pooling(request: Request) -> "PoolingResponse":
    """Return a vector for each input or for each of its tokens, or a weight for each token, as vLLM does."""
    return PoolingResponse(await open_request(request, "pooling"))


class PoolingResponse(EmbeddingsResponse):
    """Responds with what the task makes of each input, or with one error."""

    async def _send_payloads(self, payloads: Sequence[bytes], send: Send) -> None:
        if self._prepared.is_marked:
            payloads = [payload[len(RESULT_MARK) :] for payload in payloads]
        await super()._send_payloads(payloads, send)

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        """Yield the JSON of a PooledList. The vectors of an input's tokens are never all in memory as text."""
        whole = PooledList(self._id, int(time.time()), self._state.model.name, [], self._sum_usage())
        return write_pieces(whole, "data", map(self._write_one, range(len(payloads)), payloads))

    def _write_one(self, index: int, payload: bytes) -> Iterator[bytes]:
        if self._prepared.encoding == "base64":
            return write_base64(Pooled(index, ""), "data", payload)
        size = self._prepared.vector_size
        numbers: Iterable[object] = split_vectors(payload, size) if size else _read_floats(payload)
        return write_with(Pooled(index, []), "data", numbers)


def split_vectors(payload: bytes, size: int) -> Iterator[list[float]]:
    """Yield the vectors of an input's tokens, each with `size` numbers."""
    view, step = memoryview(payload), size * NUM_BYTES["float32"]
    return (_read_floats(view[begin : begin + step]) for begin in range(0, len(view), step))


def _read_floats(payload: bytes | memoryview) -> list[float]:
    numbers = array("f")
    numbers.frombytes(payload)
    return numbers.tolist()


async def embed(request: Request) -> "VectorsResponse":
    """Return only the vectors, as text-embeddings-inference does."""
    return VectorsResponse(await open_request(request, "embed"))


class VectorsResponse(EmbeddingsResponse):
    """Responds with a list of vectors, or with one error."""

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        return write_list(map(_read_floats, payloads))


async def embed_sparse(request: Request) -> "SparseResponse":
    """Return only the sparse vectors, as text-embeddings-inference does."""
    return SparseResponse(await open_request(request, "embed_sparse"))


_DENSE: Final = (
    f"its sparse vector has more than {SPARSE_NUMBERS_MAX} numbers that are not zero; "
    "the model was probably not trained to make sparse vectors"
)


class SparseResponse(EmbeddingsResponse):
    """Responds with the numbers that are not zero, for each input in ascending order of the indices."""

    def _add(self, output: RequestOutput) -> None:
        """Add the payload of one input. How large a sparse vector is shows only after its computation.

        Raises InvalidRequest if it is too large, or the payloads are too large for one answer.
        """
        super()._add(output)
        if output.payload == TOO_DENSE:
            ids = self._inputs.request_ids
            param = name_input("inputs", ids.index(output.request_id), len(ids))
            raise InvalidRequest(f"{param}: {_DENSE}", param=param)
        self._num_bytes += len(output.payload or b"")
        if self._num_bytes > RESULT_BYTES_MAX:
            most = f"the sparse vectors of these inputs have more than {RESULT_BYTES_MAX >> 20} MiB"
            raise InvalidRequest(f"{most}; send fewer at a time", param="inputs")

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        return write_nested(map(_read_sparse, payloads))


def _read_sparse(payload: bytes) -> Iterator[SparseValue]:
    middle = len(RESULT_MARK) + (len(payload) - len(RESULT_MARK)) // 2
    return map(SparseValue, array("I", payload[len(RESULT_MARK) : middle]), array("f", payload[middle:]))


async def embed_all(request: Request) -> "AllVectorsResponse":
    """Return the hidden states of each input's tokens, as text-embeddings-inference does."""
    return AllVectorsResponse(await open_request(request, "embed_all"))


class AllVectorsResponse(EmbeddingsResponse):
    """Responds with a list of vectors for each input, or with one error."""

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        size = self._prepared.vector_size
        return write_nested(split_vectors(payload.removeprefix(RESULT_MARK), size) for payload in payloads)


class CosinesResponse(ComparisonResponse):
    """Scores each pair as vLLM does: by the cosine of its two vectors, or by the MaxSim of its tokens' vectors."""

    def _score(self, payloads: Sequence[bytes]) -> list[float]:
        assert isinstance(self._comparison, PreparedCosines)
        if not self._comparison.num_first:
            return [_read_floats(payload[len(RESULT_MARK) :])[0] for payload in payloads]
        vectors = [array("f", payload) for payload in payloads]
        first, second = vectors[: self._comparison.num_first], vectors[self._comparison.num_first :]
        firsts = itertools.repeat(first[0]) if len(first) == 1 else first
        return [sum(map(operator.mul, *pair)) for pair in zip(firsts, second, strict=False)]


def _describe_for_tei(facts: ModelFacts) -> dict[str, Any]:
    embedding = EmbeddingFacts.read(facts)
    pooling = embedding.pooling if "embed" in embedding.outputs else None
    if embedding.outputs == ("embed_sparse",):
        return {"embedding": {"pooling": "splade"}}
    return {"embedding": {"pooling": "last_token" if pooling == "last" else pooling or "model"}}


def _refine(schemas: dict[str, Any]) -> None:
    needs_inputs(schemas["EmbeddingRequest"])
    needs_inputs(schemas["PoolingRequest"])


TASK: Final = TaskPaths(
    (
        TaskPath(
            "/v1/embeddings", create_embeddings, "Makes a vector of each input.", EmbeddingRequest, EmbeddingList,
            is_bytes_too=True,
        ),
        TaskPath(
            "/pooling", create_pooling, "Makes a vector of each input, or a vector or a weight of each token.",
            PoolingRequest, PooledList, is_bytes_too=True,
        ),
        TaskPath("/embed", embed, "Makes a vector of each input.", EmbedRequest, list[list[float]]),
        TaskPath(
            "/embed_sparse", embed_sparse, "Makes a sparse vector of each input.", EmbedSparseRequest,
            list[list[SparseValue]],
        ),
        TaskPath(
            "/embed_all", embed_all, "Makes a vector of each token, without pooling.", EmbedAllRequest,
            list[list[list[float]]],
        ),
        *build_comparison_paths(CosinesResponse),
        *TOKEN_PATHS,
    ),
    refine=_refine,
    describe_for_tei=_describe_for_tei,
    inputs_bytes_max=4 * 2**20,  # half of a gateway's default limit for a body
)  # fmt: skip
