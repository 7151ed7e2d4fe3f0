"""Loads a model that embeds."""

from pathlib import Path
from typing import Final

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import Build
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.runners.dual import DualRunner
from conveyor_engine.execution.runners.pool import PoolRunner
from conveyor_engine.execution.start import Progress
from conveyor_engine.loop.executor import Executor
from conveyor_engine.model_files import has_vision


def _build(config: EngineConfig, placement: Placement, progress: Progress) -> Executor:
    make = DualRunner if has_vision(Path(config.model)) else PoolRunner
    return make(config, placement, progress)


TASK: Final[Build[Executor]] = _build
