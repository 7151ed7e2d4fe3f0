"""POST /classify and /predict."""

import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from starlette.requests import Request

from conveyor_engine.serving.http.engine_response import Opened, open_request
from conveyor_engine.serving.http.one_step import OneStepResponse, PromptUsage, write_list, write_with
from conveyor_engine.serving.http.scores import activate
from conveyor_engine.serving.http.task_paths import TaskPath, TaskPaths
from conveyor_engine.tasks.classify.bodies import ClassificationRequest, PredictRequest
from conveyor_engine.tasks.classify.preparing import PreparedTexts
from conveyor_engine.wire.classification import ClassifierFacts, read_logits


class Classification(msgspec.Struct):
    """Of one input: the likeliest label, and the score of each label in the order of config.json."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct):
    """The whole answer, in the inputs' order."""

    id: str
    created: int
    model: str
    data: list[Classification]
    usage: PromptUsage
    object: str = "list"


class Prediction(msgspec.Struct):
    """The score of one label."""

    score: float
    label: str


class TextsResponse(OneStepResponse):
    """The scores of all inputs, or one error."""

    def __init__(self, opened: Opened) -> None:
        assert isinstance(opened.prepared, PreparedTexts)
        super().__init__(opened, opened.prepared)
        self._prepared = opened.prepared
        assert self._state.engine.facts is not None
        self._labels = ClassifierFacts.read(self._state.engine.facts).labels

    def _score(self, payload: bytes) -> list[float]:
        """By label."""
        return activate(read_logits(payload), self._prepared.activation)


class ClassificationResponse(TextsResponse):
    """vLLM's."""

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        whole = ClassificationList(self._id, int(time.time()), self._state.model.name, [], self._sum_usage())
        return write_with(whole, "data", (self._classify(index, payload) for index, payload in enumerate(payloads)))

    def _classify(self, index: int, payload: bytes) -> Classification:
        probs = self._score(payload)
        return Classification(index, self._labels[probs.index(max(probs))], probs, len(probs))


class PredictResponse(TextsResponse):
    """That of text-embeddings-inference: all labels, best first."""

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        if not self._prepared.is_batch:
            return write_list(self._predict(payloads[0]))
        return write_list(map(self._predict, payloads))

    def _predict(self, payload: bytes) -> list[Prediction]:
        predictions = [Prediction(*each) for each in zip(self._score(payload), self._labels, strict=True)]
        return sorted(predictions, key=lambda prediction: prediction.score, reverse=True)


async def create_classification(request: Request) -> ClassificationResponse:
    """Answers with the labels of each input. Each is an engine request of its own, so it shares batches with others."""
    return ClassificationResponse(await open_request(request, "classify"))


async def create_predictions(request: Request) -> PredictResponse:
    return PredictResponse(await open_request(request, "predict"))


TASK: Final = TaskPaths(
    (
        TaskPath("/classify", create_classification, "Labels texts.", ClassificationRequest, ClassificationList),
        TaskPath(
            "/predict", create_predictions, "Scores each label of texts.", PredictRequest,
            (list[Prediction], list[list[Prediction]]),
        ),
    ),
    inputs_bytes_max=4 * 2**20,  # half of what a gateway takes of one body by default
)  # fmt: skip
