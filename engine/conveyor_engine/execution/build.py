"""Builds the runner of the model's task, which runs the plans. Called by `loop.process`."""

from collections.abc import Callable

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.embedding_runner import EmbeddingRunner
from conveyor_engine.execution.model_runner import ModelRunner
from conveyor_engine.execution.models.sentence_files import find_task
from conveyor_engine.wire.request import Task


def build_runner(
    config: EngineConfig, progress: Callable[[str], None] = lambda _: None
) -> ModelRunner | EmbeddingRunner:
    """Loads the model. Raises ConfigError or ModelError."""
    runner = ModelRunner if find_task(config) is Task.GENERATE else EmbeddingRunner
    return runner(config, progress)
