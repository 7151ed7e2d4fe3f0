"""Builds a queue with engines, for the tests in this folder."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from tests.gateway.builders import NeverAsked, make_limits

from conveyor_gateway.admission.service_queue import ServiceQueue

FAR = 1e9  # a deadline that no test reaches


def make_queue(*engines: str, **limits: Any) -> ServiceQueue:
    queue = ServiceQueue(make_limits(**limits), asyncio.get_running_loop(), NeverAsked())
    queue.set_engines(engines)
    return queue


async def start(waiting: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task, and let it run until it waits."""
    task = asyncio.create_task(waiting)
    await asyncio.sleep(0)
    return task
