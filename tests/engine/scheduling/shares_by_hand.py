"""Divides the time of each step among its requests by hand, row by row, for histories to compare with receipts."""

from collections import defaultdict
from itertools import count
from typing import Any

import pytest

from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.scheduling.step import Step
from conveyor_engine.wire.request import RequestOutput

SECONDS = 0.001  # each reading of the clock is this much later than the one before


class SharesByHand:
    """Watches a scheduler whose clock is `read`. `history` has `now`, which steps are planned at."""

    def __init__(self, history: Any) -> None:
        self._history = history
        self._readings = count()
        self._seconds = defaultdict[str, float](float)
        self._padding = defaultdict[str, float](float)
        self._rows = defaultdict[str, list[int]](list)
        self._end = -1.0
        self.sum_seconds = self.lost_seconds = self.of_receipts = 0.0

    def read(self) -> float:
        return float(self._history.now + SECONDS * next(self._readings))

    def watch(self, scheduler: Scheduler) -> None:
        meter = scheduler._meter
        add_step = meter.add_step

        def add(step: Step) -> None:
            held = [(request, 1) for request in step.decodes] + step.prefills
            held += [(request, 1 + len(drafts)) for request, drafts in step.drafted]
            wanted = [(request, number) for request, number in held if request.request_id in scheduler.requests]
            dummies = {request.request_id for request, _ in wanted if request.steps_dummies}
            add_step(step)
            seconds = meter.step_end - max(step.planned_at, self._end)
            self._end = meter.step_end
            self.sum_seconds += seconds
            seeing = step.first_seeing
            if not wanted and seeing is not None and seeing.request_id in scheduler.requests:
                wanted = held = [(seeing, 1)]  # the step has encoded its image
            if not wanted:
                self.lost_seconds += seconds
            for request, number in wanted:
                share = seconds * number / sum(each for _, each in wanted)
                self._seconds[request.request_id] += share
                self._padding[request.request_id] += share if request.request_id in dummies else 0.0
                self._rows[request.request_id].append(len(held))

        meter.add_step = add  # type: ignore[method-assign]

    def check(self, output: RequestOutput) -> None:
        """Compare the receipt of a request's last output."""
        if output.finish_reason is None:
            assert output.receipt is None
            return
        receipt = output.receipt
        assert receipt is not None, "each last output has one"
        name = output.request_id
        assert receipt.engine_seconds == pytest.approx(self._seconds[name], abs=1e-9)
        assert receipt.padding_seconds == pytest.approx(self._padding[name], abs=1e-9)
        rows = self._rows[name]
        assert receipt.neighbours == pytest.approx(sum(rows) / len(rows) - 1 if rows else 0.0)
        assert min(receipt.queue_seconds, receipt.batch_wait_seconds) >= 0
        self.of_receipts += receipt.engine_seconds

    def check_sums(self, scheduler: Scheduler) -> None:
        """Compare the sums, after all requests have ended."""
        stats = scheduler.stats()
        assert self.of_receipts == pytest.approx(stats.busy_seconds, abs=1e-6)
        assert stats.unclaimed_seconds == pytest.approx(self.lost_seconds, abs=1e-9)
        assert stats.busy_seconds + stats.unclaimed_seconds == pytest.approx(self.sum_seconds, abs=1e-6)
        assert not scheduler._meter._decoding, "an idle engine keeps no request"
