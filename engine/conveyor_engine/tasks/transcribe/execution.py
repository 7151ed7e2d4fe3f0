"""Loads a speech model."""

from typing import Final

from conveyor_engine.execution.build import Build
from conveyor_engine.execution.runners.speech import SpeechRunner
from conveyor_engine.loop.executor import Executor

TASK: Final[Build[Executor]] = SpeechRunner
