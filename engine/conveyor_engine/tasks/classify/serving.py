"""Serves the paths of models that classify texts: POST /classify and /predict."""

import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.types import Send

from conveyor_engine.serving.http.app_state import app_state, model_facts
from conveyor_engine.serving.http.engine_response import Opened, open_request
from conveyor_engine.serving.http.one_step import OneStepResponse, PromptUsage, write_list, write_with
from conveyor_engine.serving.http.scores import Prediction, activate, describe_labels, rank
from conveyor_engine.serving.http.task_paths import TaskPath, TaskPaths
from conveyor_engine.serving.http.tokens import TOKEN_PATHS
from conveyor_engine.serving.preparing.inputs import needs_inputs
from conveyor_engine.tasks.classify.bodies import ClassificationRequest, PredictRequest
from conveyor_engine.tasks.classify.preparing import NOWHERE, PreparedTexts, PreparedWords
from conveyor_engine.wire.classification import ClassifierFacts, read_logits, read_token_labels

_OUTSIDE: Final = "O"  # the label of tokens that are not part of any entity


class Classification(msgspec.Struct):
    """Result for one input: the likeliest label, and the score of each label in the order of config.json."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct):
    """The response with the labels of all inputs, in their order."""

    id: str
    created: int
    model: str
    data: list[Classification]
    usage: PromptUsage
    object: str = "list"


class Entity(msgspec.Struct):
    """A token that has another label than "O", with names as in transformers' pipeline."""

    entity: str
    score: float
    index: int  # index of the token, counting special tokens
    word: str
    start: int  # in characters of the text
    end: int


class Entities(msgspec.Struct):
    """Result for one input of a model that labels each token."""

    index: int
    entities: list[Entity]
    num_classes: int


class EntitiesList(msgspec.Struct):
    """The response with the tokens of all inputs that have another label than "O", in their order."""

    id: str
    created: int
    model: str
    data: list[Entities]
    usage: PromptUsage
    object: str = "list"


class TextsResponse(OneStepResponse):
    """The scores of all inputs, or one error."""

    def __init__(self, opened: Opened) -> None:
        assert isinstance(opened.prepared, PreparedTexts)
        super().__init__(opened, opened.prepared)
        self._prepared = opened.prepared
        assert self._state.engine.facts is not None
        self._labels = ClassifierFacts.read(self._state.engine.facts).labels

    def _score(self, payload: bytes) -> list[float]:
        """Return the score of each label."""
        return activate(read_logits(payload), self._prepared.activation)


class ClassificationResponse(TextsResponse):
    """A response in vLLM's format."""

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        whole = ClassificationList(self._id, int(time.time()), self._state.model.name, [], self._sum_usage())
        return write_with(whole, "data", (self._classify(index, payload) for index, payload in enumerate(payloads)))

    def _classify(self, index: int, payload: bytes) -> Classification:
        probs = self._score(payload)
        return Classification(index, self._labels[probs.index(max(probs))], probs, len(probs))


class EntitiesResponse(TextsResponse):
    """A response with the tokens that have another label than "O"."""

    async def _send_answer(self, send: Send) -> None:
        assert isinstance(self._prepared, PreparedWords)
        self._held.grow(self._prepared.num_bytes)
        await super()._send_answer(send)

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        whole = EntitiesList(self._id, int(time.time()), self._state.model.name, [], self._sum_usage())
        entities = (Entities(i, self._find(i, payload), len(self._labels)) for i, payload in enumerate(payloads))
        return write_with(whole, "data", entities)

    def _find(self, number: int, payload: bytes) -> list[Entity]:
        assert isinstance(self._prepared, PreparedWords)
        tokenizer, text = self._state.model.tokenizer, self._prepared.texts[number]
        numbers, raw, found = iter(array("I", self._prepared.tokens[number])), self._prepared.activation == "none", []
        tokens = zip(zip(numbers, numbers, numbers, strict=True), read_token_labels(payload), strict=True)
        for index, ((token_id, *span), (label, logit, score)) in enumerate(tokens):
            if tuple(span) != NOWHERE and self._labels[label] != _OUTSIDE:
                start, end = span
                word = text[start:end] if token_id == tokenizer.unknown_id else tokenizer.find_piece(token_id)
                found.append(Entity(self._labels[label], logit if raw else score, index, word, start, end))
        return found


class PredictResponse(TextsResponse):
    """A response in text-embeddings-inference's format: all labels, best first."""

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        if not self._prepared.is_batch:
            return write_list(self._predict(payloads[0]))
        return write_list(map(self._predict, payloads))

    def _predict(self, payload: bytes) -> list[Prediction]:
        return rank(self._score(payload), self._labels)


async def create_classification(request: Request) -> TextsResponse:
    """Return the labels of each input. Each input is a separate engine request, so it shares batches with others."""
    if ClassifierFacts.read(model_facts(app_state(request))).classifies_tokens:
        return EntitiesResponse(await open_request(request, "classify_tokens"))
    return ClassificationResponse(await open_request(request, "classify"))


async def create_predictions(request: Request) -> PredictResponse:
    return PredictResponse(await open_request(request, "predict"))


TASK: Final = TaskPaths(
    (
        TaskPath(
            "/classify", create_classification, "Labels texts.", ClassificationRequest,
            (ClassificationList, EntitiesList),
        ),
        TaskPath(
            "/predict", create_predictions, "Scores each label of texts.", PredictRequest,
            (list[Prediction], list[list[Prediction]]),
        ),
        *TOKEN_PATHS,
    ),
    refine=lambda schemas: needs_inputs(schemas["ClassificationRequest"]),
    describe_for_tei=lambda facts: {"classifier": describe_labels(facts)},
    inputs_bytes_max=4 * 2**20,  # half of a gateway's default limit for a body
)  # fmt: skip
