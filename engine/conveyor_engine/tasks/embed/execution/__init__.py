"""Loads a model that embeds."""

from pathlib import Path
from typing import Final

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import Build
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.start import Progress
from conveyor_engine.loop.executor import Executor
from conveyor_engine.model_files import has_vision
from conveyor_engine.tasks.embed.execution.image_runner import DualRunner
from conveyor_engine.tasks.embed.execution.text_runner import PoolRunner


def _build(config: EngineConfig, placement: Placement, progress: Progress) -> Executor:
    make = DualRunner if has_vision(Path(config.model)) else PoolRunner
    return make(config, placement, progress)


TASK: Final[Build[Executor]] = _build
