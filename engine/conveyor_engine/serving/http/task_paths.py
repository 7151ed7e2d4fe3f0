"""The paths that send requests to the engine. Each task defines its paths in its `serving` module.

Several tasks may define the same path, with different bodies and answers. The task of the engine's model decides which
one serves a request. `app` uses the paths as routes, and `openapi` describes them.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from conveyor_engine import registry
from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.serving.http.app_state import app_state, model_facts
from conveyor_engine.serving.preparing.schemas import Object
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.tensors import Signature, Tensors

Handler = Callable[[Request], Awaitable[Response]]
INFER_PATH: Final = "/v2/models/{model}/infer"  # of a task with no paths of its own, whose models take tensors


@dataclass(frozen=True, slots=True)
class TaskPath:
    """A path for POST requests, with its handler and description."""

    path: str
    handler: Handler
    summary: str
    request: type[Object] | None  # the fields of its body in JSON; None: the body is a form
    whole: Any  # its answer: a struct, a list of structs, or a tuple of alternatives
    chunk: type[msgspec.Struct] | None = None  # each event of a stream, if it can stream
    form: type[Object] | None = None  # the fields and files of its body, if that may be a form
    events: tuple[type[msgspec.Struct], ...] = ()  # the events of a stream, if they have names (`type`)
    is_bytes_too: bool = False  # whether a client may request bytes instead of JSON
    is_text_too: bool = False  # the same for plain text


@dataclass(frozen=True, slots=True)
class Inference:
    """How a task serves the Open Inference Protocol: see `open_inference`."""

    kind: str  # the kind of its bodies, which the task's `preparing` module turns into `PreparedInference`
    read_signature: Callable[[ModelFacts], Signature]
    read_outputs: Callable[[ModelFacts, bytes], Tensors]  # the outputs of one item, from its payload


@dataclass(frozen=True, slots=True)
class TaskPaths:
    """All paths of a task: `serving` in the task's package."""

    paths: tuple[TaskPath, ...]
    objects: tuple[type[Object], ...] = ()  # objects that the bodies contain
    refine: Callable[[dict[str, Any]], None] = lambda _: None  # adds to the schemas what pydantic cannot derive
    inputs_bytes_max: int = 0  # limit for a body with many inputs; 0: a body has one input
    inference: Inference | None = None  # None: the task's models take no tensors
    describe_for_tei: Callable[[ModelFacts], dict[str, Any]] | None = None  # `model_type` of /info: see `info`


def load_task_paths() -> dict[str, TaskPaths]:
    """Return the paths of each task that this engine supports, text tasks first."""
    return {task: registry.load(task, "serving") for task in reversed(registry.find_packages())}


def build_task_routes() -> dict[tuple[str, str], Handler]:
    """Return the handlers of all tasks by method and path."""
    rows: dict[str, dict[str, TaskPath]] = {}
    for task, of_task in load_task_paths().items():
        for row in of_task.paths:
            rows.setdefault(row.path, {})[task] = row
    return {("POST", path): _by_task(by_task) for path, by_task in rows.items()}


def _by_task(rows: Mapping[str, TaskPath]) -> Handler:
    async def handle(request: Request) -> Response:
        facts = model_facts(app_state(request))
        row = rows.get(facts.task)
        if row is None:
            raise _wrong_task(facts, rows)
        return await row.handler(request)

    return handle


def _wrong_task(facts: ModelFacts, tasks: Iterable[str]) -> InvalidRequest:
    own = registry.load_about(facts.task)
    others = " and ".join(registry.load_about(task).does_not for task in tasks)
    message = f"this engine's model {own.does} and {others}; it answers {name_paths(facts.task)}"
    return InvalidRequest(message, code=ErrorCode.WRONG_TASK)


def name_paths(task: str) -> str:
    """Return the paths of a task's models, for messages."""
    of_task: TaskPaths = registry.load(task, "serving")
    paths = [each.path for each in of_task.paths] or [INFER_PATH]
    return " and ".join(filter(None, (", ".join(paths[:-1]), paths[-1])))
