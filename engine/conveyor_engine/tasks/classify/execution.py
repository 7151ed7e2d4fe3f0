"""Loads a classifier."""

from typing import Final

from conveyor_engine.execution.build import Build
from conveyor_engine.execution.runners.classify import build_classifier
from conveyor_engine.loop.executor import Executor

TASK: Final[Build[Executor]] = build_classifier
