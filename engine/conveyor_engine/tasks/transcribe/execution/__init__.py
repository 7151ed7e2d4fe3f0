"""Runs models that turn speech into text."""

from typing import Final

from conveyor_engine.execution.build import Build
from conveyor_engine.loop.executor import Executor
from conveyor_engine.tasks.transcribe.execution.runner import SpeechRunner

TASK: Final[Build[Executor]] = SpeechRunner
