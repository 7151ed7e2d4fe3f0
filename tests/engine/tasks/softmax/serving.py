"""Serves POST /v1/softmax."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from starlette.requests import Request
from tests.engine.tasks.softmax.preparing import PreparedSoftmax, SoftmaxRequest, read_signature

from conveyor_engine.serving.http.engine_response import open_request
from conveyor_engine.serving.http.events import encode
from conveyor_engine.serving.http.one_step import OneStepResponse
from conveyor_engine.serving.http.task_paths import Inference, TaskPath, TaskPaths
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.tensors import Tensor


class Probabilities(msgspec.Struct):
    """The response, in the order of the inputs."""

    model: str
    data: list[list[float]]


class SoftmaxResponse(OneStepResponse):
    """Responds with all probabilities, or with one error."""

    def _pieces(self, payloads: Sequence[bytes]) -> Iterator[bytes]:
        yield encode(Probabilities(self._state.model.name, [array("f", payload).tolist() for payload in payloads]))


async def create_softmax(request: Request) -> SoftmaxResponse:
    opened = await open_request(request, "softmax")
    assert isinstance(opened.prepared, PreparedSoftmax)
    return SoftmaxResponse(opened, opened.prepared)


def _read_outputs(_: ModelFacts, payload: bytes) -> dict[str, Tensor]:
    return {"probabilities": Tensor("FP32", (len(payload) // 4,), payload)}


TASK: Final = TaskPaths(
    (TaskPath("/v1/softmax", create_softmax, "Makes probabilities of numbers.", SoftmaxRequest, Probabilities),),
    inference=Inference("tensors", read_signature, _read_outputs),
)
