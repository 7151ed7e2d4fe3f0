"""Builds the runner for the model's task on this process's device. Called by `loop.process`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from conveyor_engine import registry
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ModelError, is_out_of_memory
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.placement import Placement, open_placement
from conveyor_engine.execution.start import Progress
from conveyor_protocol.failure_reasons import FailureReason

Executor = TypeVar("Executor")  # a `loop.executor.Executor`, of which this room knows nothing
Build = Callable[[EngineConfig, Placement, Progress], Executor]  # the `execution` of a task: loads the model


def build_runner(config: EngineConfig, progress: Progress = lambda _: None) -> Any:
    """A `loop.executor.Executor` with the model loaded.

    Raises ConfigError or ModelError; what else it raises is a bug or a broken device.
    """
    build: Build[Any] = registry.load(registry.find_task(config.task, Path(config.model)), "execution")
    try:
        return build(config, open_placement(config), progress)
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"the device has too little memory for the model and its settings ({checks.on_one_line(error)}); use a "
            "device with more memory or a smaller model, or lower `kv_memory_fraction`",
            reason=FailureReason.OUT_OF_MEMORY,
        ) from error
