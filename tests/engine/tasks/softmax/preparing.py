"""Turns a body with lists of numbers into one engine request for each list."""

import uuid
from array import array
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from pydantic import Field

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.jobs import BodyKind, ServedModel, parse_body
from conveyor_engine.serving.preparing.open_inference import PreparedInference, prepare_inference
from conveyor_engine.serving.preparing.prompts import Prompt
from conveyor_engine.serving.preparing.schemas import ModelFields
from conveyor_engine.wire.request import EngineRequest, ModelFacts
from conveyor_engine.wire.tensors import Signature, Tensor, TensorSpec
from conveyor_engine.wire.worker import Job, Part


class SoftmaxRequest(ModelFields):
    """POST /v1/softmax."""

    input: Annotated[list[Annotated[list[float], Field(min_length=1)]], Field(min_length=1)]
    """Lists of numbers."""


class PreparedSoftmax(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A valid request."""

    id: str
    request_ids: list[str]
    nums_prompt_tokens: list[int]  # empty: numbers are not tokens
    arrival_time: float
    ignored_fields: int
    param: str
    parts: list[Part]


def _prepare(model: ServedModel, job: Job) -> PreparedSoftmax:
    fields = parse_body(model, SoftmaxRequest, job.body)
    longest = max(map(len, fields.input))
    if longest > job.facts.max_model_len:
        message = f"a list has {longest} numbers, more than the {job.facts.max_model_len} that this model takes"
        raise InvalidRequest(message, param="input")
    request_id = f"softmax-{uuid.uuid4().hex}"
    requests = [
        EngineRequest(
            request_id=f"{request_id}-{number}",
            party=request_id,
            payload=array("f", numbers).tobytes(),
            payload_cost=len(numbers),
        )
        for number, numbers in enumerate(fields.input)
    ]
    return PreparedSoftmax(
        id=request_id,
        request_ids=[request.request_id for request in requests],
        nums_prompt_tokens=[0] * len(requests),
        arrival_time=job.arrival_time,
        ignored_fields=fields.ignored,
        param="input",
        parts=Part.split(requests, job.facts.max_num_seqs),
    )


def _prepare_tensors(model: ServedModel, job: Job) -> PreparedInference:
    def make_prompt(tensors: dict[str, Tensor], _: str) -> Prompt:
        numbers = tensors["numbers"]
        return Prompt([], numbers.data, numbers.num_elements)

    return prepare_inference(model, job, read_signature(job.facts), make_prompt)


def read_signature(facts: ModelFacts) -> Signature:
    """Return the signature: one input and one output, both of any length."""
    taken, given = (TensorSpec(name, "FP32", ("n",)) for name in ("numbers", "probabilities"))
    return Signature((taken,), (given,), {"n": (1, facts.max_model_len)})


TASK: Final[Mapping[str, BodyKind]] = {
    "softmax": BodyKind(_prepare, PreparedSoftmax),
    "tensors": BodyKind(_prepare_tensors, PreparedInference),
}
