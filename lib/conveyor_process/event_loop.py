"""The event loop of a program that serves many connections: uvloop's, or asyncio's where uvloop is not installed.

Called by the `__main__` of the gateway and of the engine. uvloop takes less processor time for each request, and has no
build for some systems.
"""

import asyncio
import importlib
import importlib.util
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a new event loop, as `asyncio.run` does."""
    factory = importlib.import_module("uvloop").new_event_loop if importlib.util.find_spec("uvloop") else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
