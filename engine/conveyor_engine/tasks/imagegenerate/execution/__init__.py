"""Runs models that generate images."""

from typing import Final

from conveyor_engine.execution.build import Build
from conveyor_engine.loop.executor import Executor
from conveyor_engine.tasks.imagegenerate.execution.runner import PaintRunner

TASK: Final[Build[Executor]] = PaintRunner
