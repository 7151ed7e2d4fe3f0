"""POST /v1/rerank, /v2/rerank, /rerank, /v1/score and /score."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.types import Send

from conveyor_engine.serving.http.engine_response import Opened, open_request
from conveyor_engine.serving.http.one_step import OneStepResponse, PromptUsage, write_list, write_with
from conveyor_engine.serving.http.scores import activate
from conveyor_engine.serving.http.task_paths import TaskPath, TaskPaths
from conveyor_engine.tasks.rerank.bodies import RerankRequest, ScoreRequest, TeiRerankRequest
from conveyor_engine.tasks.rerank.preparing import PreparedPairs
from conveyor_engine.wire.classification import read_logits


class RankedDocument(msgspec.Struct):
    """What is ranked."""

    text: str


class RerankResult(msgspec.Struct, omit_defaults=True):
    """The score of one document, which stands at `index` of the request."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankAnswer(msgspec.Struct):
    """The whole answer, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PromptUsage


class Score(msgspec.Struct):
    """The score of one pair."""

    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct):
    """The whole answer, in the pairs' order."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage
    object: str = "list"


class Rank(msgspec.Struct, omit_defaults=True):
    """The score of one text, which stands at `index` of the request; as text-embeddings-inference has it."""

    index: int
    score: float
    text: str | None = None


class PairsResponse(OneStepResponse):
    """The scores of all pairs, or one error."""

    def __init__(self, opened: Opened) -> None:
        assert isinstance(opened.prepared, PreparedPairs)
        super().__init__(opened, opened.prepared)
        self._prepared = opened.prepared

    async def _send_answer(self, send: Send) -> None:
        self._held.grow(sum(map(len, self._prepared.texts or ())))
        await super()._send_answer(send)

    def _score(self, payloads: Sequence[bytes]) -> list[float]:
        return [activate(read_logits(payload), self._prepared.activation)[0] for payload in payloads]

    def _rank(self, payloads: Sequence[bytes]) -> Iterator[tuple[int, float, str | None]]:
        """(index, score, text) of the best, best first; of equal ones the one that came first."""
        scores, texts = self._score(payloads), self._prepared.texts
        best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        for index in best[: self._prepared.top_n]:
            yield index, scores[index], None if texts is None else texts[index]


class RerankResponse(PairsResponse):
    """Best first."""

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        results = (
            RerankResult(index, score, None if text is None else RankedDocument(text))
            for index, score, text in self._rank(payloads)
        )
        return write_with(RerankAnswer(self._id, self._state.model.name, [], self._sum_usage()), "results", results)


class ScoreResponse(PairsResponse):
    """In the pairs' order."""

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        whole = ScoreList(self._id, int(time.time()), self._state.model.name, [], self._sum_usage())
        scores = (Score(index, score) for index, score in enumerate(self._score(payloads)))
        return write_with(whole, "data", scores)


class RankResponse(PairsResponse):
    """Best first, as a list."""

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        return write_list(Rank(*each) for each in self._rank(payloads))


async def create_rerank(request: Request) -> RerankResponse:
    """Answers with a score of each document. Each is an engine request of its own, so it shares batches with others."""
    return RerankResponse(await open_request(request, "rerank"))


async def create_score(request: Request) -> ScoreResponse:
    return ScoreResponse(await open_request(request, "score"))


async def create_either_rerank(request: Request) -> PairsResponse:
    """In the shape of the body: vLLM and text-embeddings-inference have the same path."""
    opened = await open_request(request, "either_rerank")
    assert isinstance(opened.prepared, PreparedPairs)
    return RankResponse(opened) if opened.prepared.as_ranks else RerankResponse(opened)


def _refine(schemas: dict[str, Any]) -> None:
    """One of two pairs of names, and of the other none."""
    one, other = ScoreRequest.pairs_of
    schemas["ScoreRequest"]["oneOf"] = [_needs(*one, without=other), _needs(*other, without=one)]


def _needs(*names: str, without: tuple[str, ...]) -> dict[str, Any]:
    given = {name: {"type": ["string", "array"]} for name in names}
    return {"required": list(names), "properties": given | {name: {"type": "null"} for name in without}}


TASK: Final = TaskPaths(
    (
        *(
            TaskPath(path, create_rerank, "Ranks documents by a query.", RerankRequest, RerankAnswer)
            for path in ("/v1/rerank", "/v2/rerank")
        ),
        *(
            TaskPath(path, create_score, "Scores pairs of texts.", ScoreRequest, ScoreList)
            for path in ("/v1/score", "/score")
        ),
        TaskPath(
            "/rerank",
            create_either_rerank,
            "Ranks texts by a query. A body with `documents` is answered as by /v1/rerank.",
            TeiRerankRequest,
            list[Rank],
        ),
    ),
    inputs_bytes_max=4 * 2**20,  # half of what a gateway takes of one body by default
    refine=_refine,
)
