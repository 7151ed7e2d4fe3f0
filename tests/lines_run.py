"""Counts lines that run, for tests of what an event costs: a count is the same on every machine, a time is not."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_lines(work: Callable[[], object], folder: str) -> int:
    """How many lines of files below `folder`, such as `/conveyor_engine/scheduling/`, `work` runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if folder not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
