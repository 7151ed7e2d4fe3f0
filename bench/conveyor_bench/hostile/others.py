"""Starts a process that measures how others are served beside an attack. Attackers and engines run elsewhere.

Used by the commands; `gateway.others` and `control.others` are such processes. Each measures from one line of its
standard input to the next, and answers each line with a line of results.
"""

import json
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from conveyor_bench.processes import Child

Taken = TypeVar("Taken")


class Others(Child, Generic[Taken]):
    """Controls the process for its command."""

    def __init__(self, module: str, targets: Any, taken: type[Taken]) -> None:
        """targets: a dataclass, which the process gets. taken: the dataclass of its answers."""
        super().__init__(f"hostile.{module}", json.dumps(asdict(targets)))
        self._taken = taken

    def read(self) -> Taken:
        """Return what was measured since the last call. Waits for unfinished requests."""
        return self._taken(**json.loads(self.send()))
