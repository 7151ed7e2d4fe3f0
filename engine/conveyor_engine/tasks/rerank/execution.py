"""Loads a cross-encoder."""

from typing import Final

from conveyor_engine.execution.build import Build
from conveyor_engine.execution.runners.classify import build_cross_encoder
from conveyor_engine.loop.executor import Executor

TASK: Final[Build[Executor]] = build_cross_encoder
