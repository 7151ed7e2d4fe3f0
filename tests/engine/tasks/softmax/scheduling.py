"""Scheduling of requests that are one list of numbers and take one step. Each number costs as much as a token."""

from array import array
from typing import Final

from conveyor_engine.scheduling.tasks import OneStep
from conveyor_engine.wire.request import EngineRequest


class Softmax(OneStep):
    """The task. All of its requests are valid, because the workers check them."""

    result_name = "probabilities"

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        payload = array("f", [float(number)] * cost).tobytes()
        return EngineRequest(request_id=str(number), payload=payload, payload_cost=cost)


TASK: Final = Softmax
