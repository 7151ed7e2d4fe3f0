"""What all kinds of bodies have in common when a worker process turns them into engine requests.

The `preparing` module of a task has a `BodyKind` for each kind of body of its paths. Used in two processes: by the
pool and the routes in the API process, and by `process` in the workers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
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
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.worker import INPUTS_MAX, Job, Part, ServedAdapter
from conveyor_protocol.surrogates import replace_lone_surrogates

Fields = TypeVar("Fields", bound=ModelFields)
# A body that escapes letters of these is prepared with the limits for texts.
_IMAGE_MARKS = (b'"image_url"', b'"input_image"', b'"image"')
_NAMED_MAX = 4  # names of models in an error


class FilesWanted(Exception):
    """A job needs files that its body names by URL."""

    def __init__(self, names: dict[str, str]) -> None:
        """names: of the files in errors, by URL."""
        super().__init__()
        self.names = names


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model against which requests are validated."""

    name: str  # the name that requests use
    text: Tokenizer | None  # None: the model's task reads no text
    sampling_defaults: SamplingDefaults
    dialect: Dialect = NO_DIALECT
    reader: Any = None  # the object that the task's `reading` module loaded; only in workers
    adapters: dict[str, ServedAdapter] = field(default_factory=dict)  # by name; in the API process they may change
    fetched: dict[str, bytes] = field(default_factory=dict)  # files of the job, by URL

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Only for models whose task reads text."""
        assert self.text is not None
        return self.text

    @property
    def names(self) -> list[str]:
        """The names that requests may use: the model's own, and one for each adapter."""
        return [self.name, *(self.full_name(name) for name, adapter in self.adapters.items() if adapter.number)]

    def full_name(self, adapter: str) -> str:
        """Return the name of the model with this adapter; "": without one."""
        return f"{self.name}:{adapter}" if adapter else self.name

    def adapter_in(self, full_name: str) -> str:
        """Return the adapter's name in what `full_name` has returned."""
        return full_name[len(self.name) + 1 :]

    def find_adapter(self, name: str | None) -> str:
        """Return the name of the adapter that this name selects; "": none. Raises UnknownModel.

        An adapter's own name selects it too, and an empty name counts as absent, as in vLLM.
        """
        if not name or name == self.name:
            return ""
        own = name if name in self.adapters else self.adapter_in(name)
        if own in self.adapters and name in (own, self.full_name(own)):
            if self.adapters[own].number:
                return own
            message = f"the adapter {own!r} is not loaded here; GET /adapters says why"
            raise UnknownModel(message, param="model", model=self.full_name(own))
        names = self.names
        known = f"{self.name!r} is"
        if len(names) > 1:
            known = f"these are: {', '.join(names[:_NAMED_MAX])}{', ...' if len(names) > _NAMED_MAX else ''}"
        raise UnknownModel(f"the model {name[:200]!r} is not served here; {known}", param="model", model=name)


class Prepared(Protocol):
    """A valid request, ready to be sent to the engine. Each kind has its own struct, with what its response needs."""

    @property
    def id(self) -> str: ...

    @property
    def parts(self) -> Sequence[Part]:
        """The engine requests, in order. A part is sent when the engine has room for it."""
        ...

    @property
    def ignored_fields(self) -> int:
        """Number of fields in the body that no API defines."""
        ...


class Lane(StrEnum):
    """Why a body's preparation may be slow. See `lanes`."""

    LONG = "long"
    FORMS = "forms"  # the answer has to follow a schema, a regex or a grammar, or to call a tool
    FILES = "files"  # images or audio
    TEMPLATES = "templates"


def always(_: bytes) -> bool:
    """Every body of the kind is costly."""
    return True


@dataclass(frozen=True, slots=True)
class BodyKind:
    """A kind of body: how it is prepared, and which resources the preparation may use."""

    prepare: Callable[[ServedModel, Job], Prepared]  # raises InvalidRequest or UnknownModel
    prepared: Any  # the struct that `prepare` returns
    runs_template: bool = False  # whether it runs a chat template: a program by the model's author, which may be slow
    lane: Lane | None = None  # of the kind's bodies that are costly, in addition to `runs_template`
    is_costly: Callable[[bytes], bool] = always  # whether a body belongs into `lane`; must be fast for 256 KiB
    with_images: str = ""  # the kind of such bodies if they may have images; empty: they may have none
    memory_bytes: int = 0  # a job may use this much, in addition to the limit for its body and the context
    cpu_seconds: float = 0.0  # a job may use this much, in addition to the limit for its body
    reading: str = "rendered with the model's chat template and tokenized"  # completes "this request could not be ..."
    advice: str = "shorten it, or mend the template"


def find_kinds(task: str) -> Mapping[str, BodyKind]:
    """Return the kinds of a task's bodies, from its `preparing` module."""
    kinds: Mapping[str, BodyKind] = registry.load(task, "preparing")
    return kinds


def choose_kind(facts: ModelFacts, kind: str, body: bytes) -> str:
    """Return the kind of this body: `kind`, or the one for bodies with images if the model reads images."""
    with_images = find_kinds(facts.task)[kind].with_images
    has_images = facts.image_place is not None and any(mark in body for mark in _IMAGE_MARKS)
    return with_images if with_images and has_images else kind


def find_kind(job: Job) -> BodyKind:
    """Return the kind of the job's body."""
    return find_kinds(job.facts.task)[job.kind]


def has_plain_kinds(task: str) -> bool:
    """Return whether the task has bodies outside its lanes. Otherwise its lanes would only keep workers idle."""
    return any(kind.lane is None or kind.is_costly is not always for kind in find_kinds(task).values())


def parse_body(model: ServedModel, schema: type[Fields], body: bytes) -> Fields:
    """Parse and validate a JSON body. Raises InvalidRequest or UnknownModel."""
    try:
        content = _read_json(body)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code=ErrorCode.INVALID_JSON) from None
    try:
        fields = schema.model_validate(content)
    except ValidationError as error:
        raise invalid_request(error) from None
    model.find_adapter(fields.model)
    return fields


def _read_json(body: bytes) -> Any:
    """Return the content. It takes less memory than pydantic's own objects for the same bytes."""
    try:
        return from_json(body)
    except ValueError:
        if (mended := replace_lone_surrogates(body)) == body:
            raise
    return from_json(mended)


def too_many(what: str, num_requests: int, job: Job, param: str) -> InvalidRequest:
    """Return the error for a body with more requests than the engine accepts at once."""
    most = f"more than the {job.num_requests_max} that this engine accepts at once"
    return InvalidRequest(f"{what} is {num_requests}, {most}", param=param)


def check_num_inputs(number: int, param: str) -> None:
    """Raise InvalidRequest if a body has more inputs than one request may have. Each input takes at least one step."""
    if number > INPUTS_MAX:
        message = f"the number of {param} is {number}, more than the {INPUTS_MAX} that one request may have"
        raise InvalidRequest(f"{message}; send them in several requests", param=param)


def name_input(param: str, index: int, number: int) -> str:
    """Return the name that errors use for input `index`, if the field `param` has `number` inputs."""
    return param if number == 1 else f"{param}[{index}]"
