"""Builds the runner for the model's task on this process's device. Called by `loop.process`."""

from collections.abc import Callable

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ModelError, is_out_of_memory
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.sentence_files import find_task
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.execution.runners.generate import GenerateRunner
from conveyor_engine.execution.runners.pool import PoolRunner
from conveyor_engine.wire.request import Task
from conveyor_process.failure_reasons import FailureReason


def build_runner(config: EngineConfig, progress: Callable[[str], None] = lambda _: None) -> GenerateRunner | PoolRunner:
    """Loads the model. Raises ConfigError or ModelError; what else it raises is a bug or a broken device."""
    runner = GenerateRunner if find_task(config) is Task.GENERATE else PoolRunner
    try:
        return runner(config, open_placement(config), progress)
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"the device has too little memory for the model and its settings ({checks.on_one_line(error)}); use a "
            "device with more memory or a smaller model, or lower `kv_memory_fraction`",
            reason=FailureReason.OUT_OF_MEMORY,
        ) from error
