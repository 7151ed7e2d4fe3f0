"""Serves POST /v1/rerank, /v2/rerank, /rerank, /v1/score and /score, for tasks whose models rerank or embed."""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Send

from conveyor_engine.serving.http.engine_response import Opened, open_request
from conveyor_engine.serving.http.one_step import OneStepResponse, PromptUsage, write_list, write_with
from conveyor_engine.serving.http.task_paths import Handler, TaskPath
from conveyor_engine.serving.preparing.comparing import PreparedComparison
from conveyor_engine.serving.preparing.comparing_schemas import RerankRequest, ScoreRequest, TeiRerankRequest


class RankedDocument(msgspec.Struct):
    """The text of a ranked document."""

    text: str


class RerankResult(msgspec.Struct, omit_defaults=True):
    """The score of the document at `index` in the request."""

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
    """The score of the text at `index` in the request, in the format of text-embeddings-inference."""

    index: int
    score: float
    text: str | None = None


class ComparisonResponse(OneStepResponse):
    """Responds with the scores of all pairs in the format that fits the request's body, or with one error."""

    def __init__(self, opened: Opened) -> None:
        assert isinstance(opened.prepared, PreparedComparison)
        super().__init__(opened, opened.prepared)
        self._comparison = opened.prepared

    @abstractmethod
    def _score(self, payloads: Sequence[bytes]) -> list[float]:
        """Return the score of each pair, in the pairs' order."""

    async def _send_answer(self, send: Send) -> None:
        self._held.grow(sum(map(len, self._comparison.texts or ())))
        await super()._send_answer(send)

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        scores = self._score(payloads)
        match self._comparison.shape:
            case "score":
                scored = (Score(index, score) for index, score in enumerate(scores))
                whole = ScoreList(self._id, int(time.time()), self._state.model.name, [], self._sum_usage())
                return write_with(whole, "data", scored)
            case "ranks":
                return write_list(Rank(*each) for each in self._rank(scores))
        results = (
            RerankResult(index, score, None if text is None else RankedDocument(text))
            for index, score, text in self._rank(scores)
        )
        return write_with(RerankAnswer(self._id, self._state.model.name, [], self._sum_usage()), "results", results)

    def _rank(self, scores: Sequence[float]) -> Iterator[tuple[int, float, str | None]]:
        """Yield (index, score, text) of the best results, best first. Equal scores keep the request's order."""
        best, texts = sorted(range(len(scores)), key=scores.__getitem__, reverse=True), self._comparison.texts
        for index in best[: self._comparison.top_n]:
            yield index, scores[index], None if texts is None else texts[index]


def build_comparison_paths(answer: Callable[[Opened], ComparisonResponse]) -> tuple[TaskPath, ...]:
    """Return the paths for a task. `answer` builds each response. Each text or pair is a separate engine request."""

    def build(kind: str) -> Handler:
        async def handle(request: Request) -> ComparisonResponse:
            return answer(await open_request(request, kind))

        return handle

    return (
        *(
            TaskPath(path, build("rerank"), "Ranks documents by a query.", RerankRequest, RerankAnswer)
            for path in ("/v1/rerank", "/v2/rerank")
        ),
        *(
            TaskPath(path, build("score"), "Scores pairs of texts.", ScoreRequest, ScoreList)
            for path in ("/v1/score", "/score")
        ),
        TaskPath(
            "/rerank",
            build("either_rerank"),
            "Ranks texts by a query. A body with `documents` is answered as by /v1/rerank, with their texts.",
            TeiRerankRequest,
            list[Rank],
        ),
    )


def needs_pairs(schemas: dict[str, Any]) -> None:
    """Add a rule to the schema of /score that pydantic cannot derive: exactly one of the pairs of fields is present."""
    every = {name for names in ScoreRequest.pairs_of for name in names}
    schemas["ScoreRequest"]["oneOf"] = [_needs(names, every.difference(names)) for names in ScoreRequest.pairs_of]


def _needs(names: tuple[str, str], without: set[str]) -> dict[str, Any]:
    given = {name: {"type": ["string", "array"]} for name in names}
    return {"required": list(names), "properties": given | {name: {"type": "null"} for name in sorted(without)}}
