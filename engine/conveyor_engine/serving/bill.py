"""Adds up the receipts of the engine requests of one HTTP request. `engine_client` adds them, and `http` reads the sum.

An HTTP request may end before the engine process has ended all its engine requests: at a stop string, or when its
client leaves. So a bill is open until the last receipt has arrived.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from conveyor_engine.wire.request import Receipt, RequestOutput
from conveyor_protocol.usage import EngineReceipt

_WAIT_SECONDS = 5.0  # the receipt arrives after the running step


class Bill:
    """The sum of the receipts so far. The times of waiting and computing are those of the slowest engine request."""

    def __init__(self) -> None:
        self._num_open = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._slowest: Receipt | None = None
        self.first_step = 0.0  # time.monotonic() of the first step of the slowest one; 0: it had no step
        self._engine_seconds = self._padding_seconds = 0.0
        self._num_preemptions = 0

    @property
    def is_settled(self) -> bool:
        """Whether the engine process has ended all engine requests that were sent to it."""
        return self._settled.is_set()

    def open(self, number: int) -> None:
        """Count engine requests that are sent to the engine process."""
        self._num_open += number
        self._settled.clear()

    def close(self, output: RequestOutput | None = None) -> None:
        """Add the receipt of an engine request's last output; None: it was refused, or the engine process has died."""
        if output is not None and (receipt := output.receipt) is not None:
            self._engine_seconds += receipt.engine_seconds
            self._padding_seconds += receipt.padding_seconds
            self._num_preemptions += output.num_preemptions
            if self._slowest is None or receipt.total_seconds > self._slowest.total_seconds:
                self._slowest, self.first_step = receipt, output.scheduled_time
        self._num_open -= 1
        if not self._num_open:
            self._settled.set()

    @property
    def preempted_at(self) -> Sequence[float]:
        """When the slowest one was preempted: the first times of `time.monotonic`."""
        return () if self._slowest is None else self._slowest.preempted_at

    async def wait(self) -> None:
        """Return when the bill is settled, or after a few seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), _WAIT_SECONDS)

    def sum_up(self) -> EngineReceipt:
        """Return the sum of the receipts that have arrived."""
        slowest = self._slowest or Receipt()
        return EngineReceipt(
            engine_ms=_round(self._engine_seconds, 3),
            padding_ms=_round(self._padding_seconds, 3),
            queue_ms=_round(slowest.queue_seconds),
            batch_wait_ms=_round(slowest.batch_wait_seconds),
            prefill_ms=_round(slowest.prefill_seconds),
            decode_ms=_round(slowest.decode_seconds),
            neighbours=round(slowest.neighbours, 1),
            preempted=self._num_preemptions,
            closed_by=slowest.close_reason,
        )


def _round(seconds: float, digits: int = 1) -> float:
    return round(1000 * seconds, digits)
