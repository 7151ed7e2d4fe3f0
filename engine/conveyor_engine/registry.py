"""Finds tasks and their modules for each process. Used by every process of the engine.

A task is a package that has all code that only this task needs. For each process it has a module, or a package if that
reads better, with a `TASK` whose type depends on the process:

    about        all processes      the words for its messages, and how to detect its models: `About`
    scheduling   engine process     cost and result of a request: `scheduling.tasks.Task`, built from the model's facts
    execution    engine process     loads a model of the task; imports torch: `execution.build.Build`
    reading      fork server        only if `About.reads`: loads what the workers need; may import transformers
    preparing    worker processes   reads bodies: a `serving.preparing.jobs.Kind` for each kind of body, by its name
    serving      API process        its paths: `serving.http.task_paths.TaskPaths`
    describing   `check`            only if `About.describes`: says from a model's small files what it makes

A process imports only its own modules, and those beside them (`bodies`, `facts`), which several processes share. No
task imports another, and nothing but this module loads them. The built-in tasks are in `tasks`. An installed package
can add a task with an entry point in the group `conveyor.tasks`: the name of the task, and the name of its package.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from conveyor_engine.errors import ConfigError
from conveyor_engine.model_files import PIPELINE_INDEX, read_architectures, read_pipeline_class
from conveyor_protocol.tasks import ONE_STEP_OF_TEXT, TASKS, Allows

GROUP: Final = "conveyor.tasks"
_OURS: Final = {name.lower(): f"conveyor_engine.tasks.{name.lower()}" for name in reversed(TASKS)}


@dataclass(frozen=True, slots=True)
class About:
    """The description of a task for all processes. Messages contain its words."""

    does: str  # as in "this engine's model generates text"
    does_not: str  # as in "it generates no text"
    recognises: Callable[[Path], bool]  # whether a model's directory is for this task. Raises ModelError
    allows: Allows = ONE_STEP_OF_TEXT  # the settings that apply to it; a task of Conveyor has its row of `TASKS`
    cost_unit: str = "tokens"  # unit of a request's cost, for `max_num_batched_tokens` and for metrics
    reads_text: bool = True  # whether it needs the model's tokenizer
    reads: bool = False  # whether its workers need an object that the module `reading` loads
    runs_also: tuple[str, ...] | None = None  # other tasks whose models it runs if `task` names it; None: all
    describes: bool = False  # whether the module `describing` says what a model makes
    check: Callable[[Path], object] | None = None  # raises ModelError if the small files of a model rule it out


@cache
def find_packages() -> dict[str, str]:
    """Return the package of each task by the task's name: first installed packages' tasks, then the built-in ones."""
    brought = {point.name: point.value for point in entry_points(group=GROUP) if point.name not in _OURS}
    return brought | _OURS


def load(task: str, process: str) -> Any:
    """Return the description of the task for one process. Raises ConfigError if there is none."""
    module = f"{find_packages()[task]}.{process}"
    try:
        return import_module(module).TASK
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the task {task!r} has no description for this process: {module}: {error}") from error


def find_task(wanted: str, directory: Path) -> str:
    """Return `wanted`, or if it is `auto`, the first task that recognises the model's files in `directory`.

    Raises ModelError, or ConfigError if the task `wanted` cannot run the model.
    """
    found = next(task for task in find_packages() if load_about(task).recognises(directory))
    if wanted in ("auto", found) or not directory.is_dir():
        return found if wanted == "auto" else wanted
    runs_also = load_about(wanted).runs_also
    if runs_also is not None and found not in runs_also:
        raise ConfigError(
            f"`task: {wanted}` is set, but the model {load_about(found).does} ({_name_classes(directory)}); "
            f"leave `task` out, or set `task: {found}`"
        )
    return wanted


def _name_classes(directory: Path) -> str:
    if (directory / PIPELINE_INDEX).is_file():
        return f"its {PIPELINE_INDEX} has {read_pipeline_class(directory)}"
    return f"its config.json has {', '.join(read_architectures(directory))[:200] or 'no architectures'}"


def load_about(task: str) -> About:
    about: About = load(task, "about")
    return about
