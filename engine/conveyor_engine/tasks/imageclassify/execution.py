"""Loads a classifier of images."""

from typing import Final

from conveyor_engine.execution.build import Build
from conveyor_engine.execution.runners.image import ImageClassifyRunner
from conveyor_engine.loop.executor import Executor

TASK: Final[Build[Executor]] = ImageClassifyRunner
