"""Builds the runner for the model's task on this process's device. Called by `loop.process` and `rank_process`."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from conveyor_engine import registry
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ModelError, is_out_of_memory
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.placement import Placement, open_placement
from conveyor_engine.execution.ranks import Fail, RankedRunner, Ranks
from conveyor_engine.execution.start import Progress
from conveyor_protocol.failure_reasons import FailureReason

Executor = TypeVar("Executor")  # a `loop.executor.Executor`; this package does not import it
Build = Callable[[EngineConfig, Placement, Progress], Executor]  # a task's `execution` function; it loads the model


def build_runner(config: EngineConfig, progress: Progress = lambda _: None, fail: Fail = lambda *_: os._exit(1)) -> Any:
    """Return a `loop.executor.Executor` that has loaded the model.

    fail: ends the process, with a reason, after another rank of the model has ended. Raises ConfigError or ModelError.
    Any other exception is a bug or a broken device.
    """
    task, world_size = registry.find_task(config.task, Path(config.model)), config.tensor_parallel_size
    if world_size > 1 and not registry.load_about(task).allows.divides:
        progress(f"event=devices_unused task={task} devices={world_size - 1}")
        world_size = 1
    if world_size == 1:
        return _load(config, task, partial(open_placement, config), progress)
    ranks = Ranks(config, fail)
    place = partial(open_placement, config, 0, world_size, ranks.meeting)
    return RankedRunner(_load(config, task, place, progress), ranks)


def load_rank(config: EngineConfig, rank: int, meeting: str) -> Any:
    """Return the runner of a rank other than 0, whose `begin` runs the plans of rank 0. Raises like `build_runner`."""
    task = registry.find_task(config.task, Path(config.model))
    place = partial(open_placement, config, rank, config.tensor_parallel_size, meeting)
    return _load(config, task, place, lambda _: None)


def _load(config: EngineConfig, task: str, place: Callable[[], Placement], progress: Progress) -> Any:
    build: Build[Any] = registry.load(task, "execution")
    try:
        return build(config, place(), progress)
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"the device has too little memory for the model and its settings ({checks.on_one_line(error)}); use a "
            f"device with more memory or a smaller model{', use fewer adapters' if config.adapters else ''}, or lower "
            "`kv_memory_fraction`",
            reason=FailureReason.OUT_OF_MEMORY,
        ) from error
