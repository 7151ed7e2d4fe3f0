"""Runs models that generate text."""

from typing import Final

from conveyor_engine.execution.build import Build
from conveyor_engine.loop.executor import Executor
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner

TASK: Final[Build[Executor]] = GenerateRunner
