"""Finds tasks, and what each process needs to know of one. Used by every process of the engine.

A task is a package with a module for each process. Each module has a `TASK`, whose type belongs to its process:

    about        all processes      what its models do, and how their files show it: `About`
    scheduling   engine process     what a request costs, and what comes out: `scheduling.tasks.Task`, made of the facts
    execution    engine process     loads a model of the task; knows torch: `execution.build.Build`
    preparing    worker processes   reads bodies: `serving.preparing.jobs.Kind`, by the name of each kind of body
    serving      API process        its paths: `serving.http.task_paths.TaskPaths`

No process imports a module that is not for it. Our own tasks are in `tasks`. An installed package brings another by an
entry point of the group `conveyor.tasks`: the task's name, and the name of its package.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Literal

from conveyor_engine.errors import ConfigError
from conveyor_engine.model_files import read_architectures

GROUP: Final = "conveyor.tasks"
_OURS: Final = {name: f"conveyor_engine.tasks.{name}" for name in ("rerank", "classify", "embed", "generate")}


@dataclass(frozen=True, slots=True)
class About:
    """What all processes know of a task. Messages are made of its words."""

    does: str  # as in "this engine's model generates text"
    does_not: str  # as in "it generates no text"
    path: str  # that its models answer, the first to try
    recognises: Callable[[Path], bool]  # whether a model's directory is for this task. Raises ModelError
    batching_mode: Literal["continuous", "dynamic"] = "dynamic"  # that its engines have, if nothing else is set
    reads_text: bool = True  # whether it needs the model's tokenizer
    runs_also: tuple[str, ...] | None = None  # tasks whose models it can run too, if asked for; None: any


@cache
def find_packages() -> dict[str, str]:
    """The package of each task, by the task's name: first those that installed packages bring."""
    brought = {point.name: point.value for point in entry_points(group=GROUP) if point.name not in _OURS}
    return brought | _OURS


def load(task: str, process: str) -> Any:
    """The description of the task for one process. Raises ConfigError if there is none."""
    module = f"{find_packages()[task]}.{process}"
    try:
        return import_module(module).TASK
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the task {task!r} has no description for this process: {module}: {error}") from error


def find_task(wanted: str, directory: Path) -> str:
    """The task of the model in `directory`: the one that is `wanted`, or with `auto` the first that knows its files.

    Raises ModelError, or ConfigError if the model is for another task.
    """
    found = next(task for task in find_packages() if load_about(task).recognises(directory))
    if wanted in ("auto", found) or not directory.is_dir():
        return found if wanted == "auto" else wanted
    runs_also = load_about(wanted).runs_also
    if runs_also is not None and found not in runs_also:
        classes = ", ".join(read_architectures(directory))[:200] or "no architectures"
        raise ConfigError(
            f"`task: {wanted}` is set, but the model {load_about(found).does} (its config.json has {classes}); "
            f"leave `task` out, or set `task: {found}`"
        )
    return wanted


def load_about(task: str) -> About:
    about: About = load(task, "about")
    return about
