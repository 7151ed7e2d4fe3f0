"""Loads a model that generates text."""

from typing import Final

from conveyor_engine.execution.build import Build
from conveyor_engine.execution.runners.generate import GenerateRunner
from conveyor_engine.loop.executor import Executor

TASK: Final[Build[Executor]] = GenerateRunner
