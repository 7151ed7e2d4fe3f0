"""A body on its way to a worker, and what a worker makes of it: what all kinds of bodies have in common.

The `preparing` module of a task has a `Kind` for each kind of body that its paths take. Used on both sides: by the pool
and the routes in the API process, and by `process` in the workers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from conveyor_engine import registry
from conveyor_engine.errors import ErrorCode, InvalidRequest, UnknownModel
from conveyor_engine.serving.preparing.refusals import invalid_request
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.serving.preparing.schemas import ModelFields
from conveyor_engine.text.parsing.dialect import NO_DIALECT, Dialect
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.worker import INPUTS_MAX, Job, Part

Fields = TypeVar("Fields", bound=ModelFields)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a request is checked against."""

    name: str  # what requests call it
    text: Tokenizer | None  # None: its task reads no text
    sampling_defaults: SamplingDefaults
    dialect: Dialect = NO_DIALECT
    reader: Any = None  # what the task's `reading` has loaded; in workers only

    @property
    def tokenizer(self) -> Tokenizer:
        """Of a model whose task reads text."""
        assert self.text is not None
        return self.text


class Prepared(Protocol):
    """An admissible request. Each kind has a struct for it, with what its answer needs beside this."""

    @property
    def id(self) -> str: ...

    @property
    def parts(self) -> Sequence[Part]:
        """The engine requests, in order. Several parts are sent one after the other, as those before them end."""
        ...

    @property
    def ignored_fields(self) -> int:
        """Fields of the body that nobody defines."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of body."""

    prepare: Callable[[ServedModel, Job], Prepared]  # raises InvalidRequest or UnknownModel
    prepared: Any  # the struct that `prepare` returns
    runs_template: bool = False  # whether it runs a program of the model's author, and may be slow
    memory_bytes: int = 0  # that a job may add, beside what its body and the context allow it
    cpu_seconds: float = 0.0  # that a job may take, likewise
    reading: str = "rendered with the model's chat template and tokenized"  # as in "this request could not be ..."
    advice: str = "shorten it, or mend the template"


def find_kind(job: Job) -> Kind:
    """The kind of the job's body, as the task of the engine has it."""
    kinds: Mapping[str, Kind] = registry.load(job.facts.task, "preparing")
    return kinds[job.kind]


def parse_body(model: ServedModel, schema: type[Fields], body: bytes) -> Fields:
    """Raises InvalidRequest or UnknownModel."""
    try:
        content = from_json(body)  # takes less memory than what pydantic makes of the same bytes
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code=ErrorCode.INVALID_JSON) from None
    try:
        fields = schema.model_validate(content)
    except ValidationError as error:
        raise invalid_request(error) from None
    if fields.model is not None:
        check_model(model.name, fields.model)
    return fields


def too_many(what: str, num_requests: int, job: Job, param: str) -> InvalidRequest:
    """The error for a body of more requests than the engine ever takes."""
    most = f"more than the {job.num_requests_max} this engine ever takes at once"
    return InvalidRequest(f"{what} is {num_requests}, {most}", param=param)


def check_num_inputs(number: int, param: str) -> None:
    """Refuses a body of more inputs, of a step each, than one answer may be about."""
    if number > INPUTS_MAX:
        message = f"the number of {param} is {number}, more than the {INPUTS_MAX} that one request may have"
        raise InvalidRequest(f"{message}; send them in several requests", param=param)


def name_input(param: str, index: int, number: int) -> str:
    """The name of one of so many inputs in the field `param`, as errors have it."""
    return param if number == 1 else f"{param}[{index}]"


def check_model(served: str, asked: str) -> None:
    """Raises UnknownModel unless `asked` is the served name."""
    if asked != served:
        raise UnknownModel(f"the model {asked[:200]!r} is not served here; {served!r} is", param="model")
