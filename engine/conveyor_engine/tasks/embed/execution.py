"""Loads a model that embeds."""

from typing import Final

from conveyor_engine.execution.build import Build
from conveyor_engine.execution.runners.pool import PoolRunner
from conveyor_engine.loop.executor import Executor

TASK: Final[Build[Executor]] = PoolRunner
