"""Loads a model that embeds."""

from pathlib import Path
from typing import Final

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import Build
from conveyor_engine.execution.models.kinds import DUAL_ENCODER, find_kind
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.start import Progress
from conveyor_engine.loop.executor import Executor
from conveyor_engine.tasks.embed.execution.image_runner import DualRunner
from conveyor_engine.tasks.embed.execution.text_runner import PoolRunner


def _build(config: EngineConfig, placement: Placement, progress: Progress) -> Executor:
    kind = find_kind("embed", Path(config.model))
    if kind is DUAL_ENCODER:
        return DualRunner(config, placement, progress)
    assert kind is not None
    return PoolRunner(config, placement, progress, kind)


TASK: Final[Build[Executor]] = _build
