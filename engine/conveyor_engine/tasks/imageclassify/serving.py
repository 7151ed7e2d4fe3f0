"""Serves POST /v1/images/classify and the Open Inference Protocol."""

import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from conveyor_engine.serving.http.engine_response import Opened, open_request
from conveyor_engine.serving.http.one_step import OneStepResponse, write_with
from conveyor_engine.serving.http.receipts import Receipt
from conveyor_engine.serving.http.scores import Prediction, activate, rank
from conveyor_engine.serving.http.task_paths import Inference, TaskPath, TaskPaths
from conveyor_engine.tasks.imageclassify.bodies import ImageClassificationForm, ImageClassificationRequest
from conveyor_engine.tasks.imageclassify.preparing import PreparedImages
from conveyor_engine.tasks.imageclassify.tensors import read_outputs, read_signature
from conveyor_engine.wire.classification import read_logits
from conveyor_engine.wire.images import ImageFacts


class ImageClassification(msgspec.Struct):
    """Result for one image: the likeliest label, and the scores of the best ones."""

    index: int
    label: str
    scores: list[Prediction]
    num_classes: int


class ImageUsage(msgspec.Struct):
    """The images of a request."""

    images: int
    receipt: Receipt | UnsetType = UNSET


class ImageClassificationList(msgspec.Struct):
    """The response with the labels of all images, in their order."""

    id: str
    created: int
    model: str
    data: list[ImageClassification]
    usage: ImageUsage
    object: str = "list"


class ImagesResponse(OneStepResponse):
    """The scores of all images, or one error."""

    def __init__(self, opened: Opened) -> None:
        assert isinstance(opened.prepared, PreparedImages)
        super().__init__(opened, opened.prepared)
        self._prepared = opened.prepared
        assert self._state.engine.facts is not None
        self._labels = ImageFacts.read(self._state.engine.facts).labels

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        usage = ImageUsage(len(payloads), self._find_receipt())
        whole = ImageClassificationList(self._id, int(time.time()), self._state.model.name, [], usage)
        return write_with(whole, "data", (self._classify(index, payload) for index, payload in enumerate(payloads)))

    def _classify(self, index: int, payload: bytes) -> ImageClassification:
        scores = rank(activate(read_logits(payload), self._prepared.activation), self._labels)
        return ImageClassification(index, scores[0].label, scores[: self._prepared.top_k], len(scores))


async def classify_images(request: Request) -> ImagesResponse:
    """Return the labels of each image. Each image is a separate engine request, so it shares batches with others."""
    return ImagesResponse(await open_request(request, "images"))


TASK: Final = TaskPaths(
    (
        TaskPath(
            "/v1/images/classify", classify_images, "Labels images.", ImageClassificationRequest,
            ImageClassificationList, form=ImageClassificationForm,
        ),
    ),
    inputs_bytes_max=8 * 2**20,  # a gateway's default limit for a body
    inference=Inference("image_tensors", read_signature, read_outputs),
)  # fmt: skip
