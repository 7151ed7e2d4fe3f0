"""Divides the time of each step among its requests, for their receipts. Used by `scheduler` and `outputs`.

A step's time is divided by the tokens that its rows compute, dummies included. If the model itself pads a batch, each
row gets the same part. A row that decodes takes part in nearly every step, so no step does work for it: `Meter` sums up
what each step costs a row with one token. A request reads the sum when it begins to decode, and again when it ends
(ADR 182).
"""

import math
from collections.abc import Callable
from typing import Final

from conveyor_engine.scheduling.account import Account
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.step import Step
from conveyor_engine.wire.request import Receipt

_PREEMPTIONS_MAX: Final = 8  # of one request, whose times are kept


class Meter:
    """Writes the accounts of the requests, and sums up the steps.

    The time of all steps is `busy_seconds`, of which the accounts of all requests are the sum, and `unclaimed_seconds`.
    """

    def __init__(self, clock: Callable[[], float], *, divides_by_rows: bool) -> None:
        """clock: the one of the requests' times. divides_by_rows: whether the model itself pads a batch."""
        self._clock = clock
        self._divides_by_rows = divides_by_rows
        self.step_end = -math.inf  # when the last step ended
        self.busy_seconds = 0.0
        self.unclaimed_seconds = 0.0  # of steps whose requests had all ended before the step
        # Sums over all steps: the cost of a row with one token, the rows, the steps.
        self._seconds = 0.0
        self._num_rows = self._num_steps = 0
        self._decoding: list[RequestState] = []  # rows that decoded in the last step and have not ended

    def add_step(self, step: Step) -> None:
        """Divide the time of a step that ends now, with a result or with an exception."""
        now = self._clock()
        seconds, self.step_end = max(0.0, now - max(step.planned_at, self.step_end)), now
        if self._divides_by_rows:
            self._divide_by_rows(step, seconds)
            return
        decodes = step.decodes
        others = step.prefills
        if step.drafted:
            others = [*((request, 1 + len(drafts)) for request, drafts in step.drafted), *others]
        num_rows = num_tokens = len(decodes)
        if decodes != self._decoding:
            num_tokens -= self._change_rows(decodes)
        if others:
            num_rows += len(others)
            others = [each for each in others if not _is_over(each[0])]
            num_tokens += sum(number for _, number in others)
        if not num_tokens:
            self._add_unwanted(step, seconds)
            return
        price = seconds / num_tokens
        self._seconds += price
        self._num_rows += num_rows
        self._num_steps += 1
        self.busy_seconds += seconds
        for request, number in others:
            request.account.add(price * number, num_rows)
            if request.padded_from is not None and request.finished is None:
                request.account.padding_seconds += price * number

    def _change_rows(self, decodes: list[RequestState]) -> int:
        """Let these rows decode, and no others. Returns how many of them have ended since the step was planned.

        In most steps, rows end or come last. So the rows of the last step are the first ones of this step.
        """
        before = self._decoding
        wanted, joining = decodes, decodes[len(before) :]
        if decodes[: len(before)] != before or [each for each in joining if each.finished is not None and each.row < 0]:
            wanted = [each for each in decodes if each.finished is None or each.row >= 0]
            joining = wanted[len(before) :]
            if wanted[: len(before)] != before:
                joining = list(set(wanted).difference(before))
                for request in set(before).difference(wanted):
                    self._settle(request.account)
                    request.account.decodes = False
        for account in [request.account for request in joining]:
            account.decodes = True
            account.since, account.since_rows, account.since_steps = self._seconds, self._num_rows, self._num_steps
        self._decoding = wanted.copy()
        return len(decodes) - len(wanted)

    def _divide_by_rows(self, step: Step, seconds: float) -> None:
        works = [work for work in step.work if not _is_over(work.request)]
        if not works:
            self._add_unwanted(step, seconds)
            return
        part = seconds / len(works)
        for work in works:
            work.request.account.add(part, len(step.work))
            work.request.account.padding_seconds += part * (1 - work.num_tokens / step.largest_tokens)
        self.busy_seconds += seconds

    def _add_unwanted(self, step: Step, seconds: float) -> None:
        """Add a step without rows that are still needed: only an image was encoded, or all its requests have ended."""
        seeing = step.first_seeing
        if seeing is None or _is_over(seeing):
            self.unclaimed_seconds += seconds
        else:
            seeing.account.add(seconds, 1)
            self.busy_seconds += seconds

    def _settle(self, account: Account) -> None:
        """Add the steps since the request began to decode."""
        account.seconds += self._seconds - account.since
        account.num_rows += self._num_rows - account.since_rows
        account.num_steps += self._num_steps - account.since_steps
        account.since, account.since_rows, account.since_steps = self._seconds, self._num_rows, self._num_steps

    def note_first_token(self, request: RequestState) -> None:
        request.account.first_token_time = self.step_end

    def note_preempted(self, request: RequestState) -> None:
        if len(request.account.preempted_at) < _PREEMPTIONS_MAX:
            request.account.preempted_at += (self._clock(),)

    def note_finished(self, request: RequestState) -> None:
        """Count the later steps of the request as padding, because its answer is complete and held back."""
        if request.account.decodes:
            self._settle(request.account)
        request.account.seconds_when_finished = request.account.seconds

    def note_closed(self, reason: str, batch: list[RequestState], now: float) -> None:
        """Note why a batch closes, and how long it could have run already: since the last batch's last step."""
        for request in batch:
            request.account.close_reason = reason
            request.account.batch_wait_seconds = now - min(now, max(request.arrival_time, self.step_end))

    def close(self, request: RequestState) -> Receipt:
        """Return the receipt of a request that ends now."""
        account = request.account
        if account.decodes:
            self._settle(account)
            self._decoding.remove(request)
        padding = account.padding_seconds
        if account.seconds_when_finished is not None:
            padding += account.seconds - account.seconds_when_finished
        end = self.step_end if account.num_steps else self._clock()
        began = request.scheduled_time if request.was_admitted else end
        first = end if account.first_token_time is None else account.first_token_time
        return Receipt(
            engine_seconds=account.seconds,
            padding_seconds=padding,
            queue_seconds=max(0.0, began - request.arrival_time - account.batch_wait_seconds),
            batch_wait_seconds=account.batch_wait_seconds,
            prefill_seconds=max(0.0, first - began),
            decode_seconds=max(0.0, end - first),
            neighbours=account.num_rows / account.num_steps - 1 if account.num_steps else 0.0,
            close_reason=account.close_reason,
            preempted_at=account.preempted_at,
        )


def _is_over(request: RequestState) -> bool:
    """Return whether the request has had its last output, or is never computed again."""
    return request.finished is not None and request.row < 0
