"""Keeps the statistics of the last steps, for the page /steps. `metrics` adds them.

A step costs one append. The differences between steps are computed when somebody reads the page.
"""

import time
from collections import deque
from itertools import pairwise
from typing import Final

from conveyor_engine.wire.request import EngineStats
from conveyor_protocol.engine_pages import MAX_STEPS, StepRecord

_ROUNDED: Final = 4


class StepLog:
    """The last MAX_STEPS steps."""

    def __init__(self) -> None:
        self._kept = deque([(0.0, EngineStats())], maxlen=MAX_STEPS + 1)

    def add(self, stats: EngineStats) -> None:
        """Add the statistics after a step that has just ended."""
        self._kept.append((time.time(), stats))

    def read(self) -> list[StepRecord]:
        """Return the steps, the oldest first."""
        return [_build(before, ended, after) for (_, before), (ended, after) in pairwise(self._kept)]


def _build(before: EngineStats, ended: float, after: EngineStats) -> StepRecord:
    num_padding = after.padding_tokens - before.padding_tokens  # of several steps, if one report covers them
    padding = min(1.0, num_padding / after.step_num_tokens) if after.step_num_tokens else 0.0
    closed = after.num_batches > before.num_batches
    busy = after.busy_seconds + after.unclaimed_seconds - before.busy_seconds - before.unclaimed_seconds
    return StepRecord(
        ended=round(ended, _ROUNDED),
        seconds=round(busy, 6),
        rows=after.step_num_seqs,
        tokens=after.step_num_tokens,
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        generated_tokens=after.generation_tokens - before.generation_tokens,
        padding_share=round(max(padding, after.batch_padding_share if closed else 0.0), _ROUNDED),
        waiting=after.num_waiting,
        closed_by=_find_reason(before, after) if closed else None,
    )


def _find_reason(before: EngineStats, after: EngineStats) -> str | None:
    counts = before.batch_close_reasons
    return next((reason for reason, count in after.batch_close_reasons.items() if count > counts.get(reason, 0)), None)
