"""Runs custom models."""

from typing import Final

from conveyor_engine.execution.build import Build
from conveyor_engine.loop.executor import Executor
from conveyor_engine.tasks.custom.execution.runner import CustomRunner

TASK: Final[Build[Executor]] = CustomRunner
