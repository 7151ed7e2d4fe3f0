"""Says from a model's small files what requests can get of it, for `python -m conveyor_engine check`."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from conveyor_engine.tasks.embed.execution.outputs import find_outputs
from conveyor_engine.tasks.embed.facts import describe_outputs


def _describe(directory: Path) -> str:
    """Return a list of outputs with their paths. Raises ModelError."""
    return describe_outputs(find_outputs(directory))


TASK: Final[Callable[[Path], str]] = _describe
