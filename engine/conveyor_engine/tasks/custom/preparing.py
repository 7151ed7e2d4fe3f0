"""Turns the items of a body into engine requests. Runs in worker processes."""

from collections.abc import Mapping
from typing import Final

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.jobs import BodyKind, ServedModel
from conveyor_engine.serving.preparing.open_inference import PreparedInference, prepare_inference
from conveyor_engine.serving.preparing.prompts import Prompt
from conveyor_engine.tasks.custom.facts import read_facts
from conveyor_engine.wire.tensors import Tensor, encode_tensors
from conveyor_engine.wire.worker import Job


def prepare_tensors(model: ServedModel, job: Job) -> PreparedInference:
    """Prepare a body of the Open Inference Protocol. Raises InvalidRequest or UnknownModel."""

    def make_prompt(tensors: dict[str, Tensor], name: str) -> Prompt:
        cost = sum(tensor.num_elements for tensor in tensors.values())
        if cost > job.facts.max_model_len:
            message = f"{name} has {cost} elements, more than the {job.facts.max_model_len} of the largest item"
            raise InvalidRequest(message, param="inputs")
        return Prompt([], encode_tensors(tensors), max(1, cost))

    return prepare_inference(model, job, read_facts(job.facts).signature, make_prompt)


TASK: Final[Mapping[str, BodyKind]] = {"tensors": BodyKind(prepare_tensors, PreparedInference)}
