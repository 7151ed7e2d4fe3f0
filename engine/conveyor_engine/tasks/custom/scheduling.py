"""Scheduling of items, each of which consists of tensors."""

import math
from typing import Final

from conveyor_engine.scheduling.outputs import Outputs
from conveyor_engine.scheduling.step import Step
from conveyor_engine.scheduling.tasks import OneStep
from conveyor_engine.tasks.custom.facts import FAILED, read_facts
from conveyor_engine.wire.request import EngineRequest, ModelFacts
from conveyor_engine.wire.step import StepResult
from conveyor_engine.wire.tensors import (
    Datatype,
    Signature,
    Tensor,
    TensorSpec,
    encode_elements,
    encode_tensors,
    find_element_bytes,
)


class Custom(OneStep):
    """The task that runs users' own models. An item's cost is its number of elements. Its payload has the tensors."""

    result_name = "outputs"

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        of_task = read_facts(facts)
        self.packs = of_task.packs
        self._signature = of_task.signature

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """Build a request with the largest item of zeros that has at most `cost` elements."""
        tensors = build_item(self._signature, cost)
        cost = max(1, sum(tensor.num_elements for tensor in tensors.values()))
        return EngineRequest(request_id=str(number), payload=encode_tensors(tensors), payload_cost=cost)

    def update(self, outputs: Outputs, step: Step, result: StepResult) -> None:
        assert result.payloads is not None
        for work, payload in zip(step.work, result.payloads, strict=True):
            if work.is_wanted and payload.startswith(FAILED):
                outputs.add_payload(work, b"", payload.removeprefix(FAILED).decode())
            elif work.is_wanted:
                outputs.add_payload(work, payload[1:], self.not_finite)


def build_item(signature: Signature, cost: int) -> dict[str, Tensor]:
    """Build the longest item of zeros that has at most `cost` elements, or the shortest item if all have more."""
    longest = max((most for _, most in signature.lengths.values()), default=1)
    least, most = 1, longest
    while least < most:
        middle = (least + most + 1) // 2
        if count_elements(signature, middle) <= cost:
            least = middle
        else:
            most = middle - 1
    return {
        spec.name: Tensor(spec.datatype, shape, _zeros(spec.datatype, shape))
        for spec, shape in _list_shapes(signature, least)
    }


def count_elements(signature: Signature, length: int) -> int:
    """Return the number of elements of an item whose lengths are all `length`, as far as their limits allow."""
    return sum(math.prod(shape) for _, shape in _list_shapes(signature, length))


def _list_shapes(signature: Signature, length: int) -> list[tuple[TensorSpec, tuple[int, ...]]]:
    lengths = {name: max(least, min(length, most)) for name, (least, most) in signature.lengths.items()}
    return [(spec, signature.fill(spec, lengths)) for spec in signature.inputs]


def _zeros(datatype: Datatype, shape: tuple[int, ...]) -> bytes:
    number, each = math.prod(shape), find_element_bytes(datatype)
    return encode_elements([b""] * number) if each is None else bytes(number * each)


TASK: Final = Custom
