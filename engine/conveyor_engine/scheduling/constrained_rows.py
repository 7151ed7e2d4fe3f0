"""The running rows whose tokens follow a constraint: their masks, the steps that they sit out, and their ends.

Used by `scheduler`. Another process builds the masks, so a mask may be late.
"""

from conveyor_engine.scheduling.constraint import Constraint, MaskSource
from conveyor_engine.scheduling.outputs import Outputs
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.running_batch import RunningBatch
from conveyor_engine.scheduling.step import Step
from conveyor_engine.wire.request import FinishReason
from conveyor_engine.wire.step import RowMask

MASK_WAIT_SECONDS = 0.002  # how long a step waits for masks, while the device computes it
LATENESS_MAX = 8  # no step waits for a row whose masks are often late
_LATE = 4  # added to `lateness`; a mask in time takes 1 away


class ConstrainedRows:
    """The constrained requests of the running batch. Without any, all methods return at once."""

    def __init__(self, batch: RunningBatch, outputs: Outputs, masks: MaskSource | None, *, has_states: bool) -> None:
        """masks: builds the masks in another process; None: constraints are always ready."""
        self._batch = batch
        self._has_states = has_states
        self._outputs = outputs
        self._masks = masks
        self.exist = False  # whether any request ever had a constraint

    def flush(self) -> None:
        """Send what the rows have been given since the last call."""
        if self.exist and self._masks is not None:
            self._masks.flush()

    def end_complete(self) -> None:
        """End the requests whose constraints allow no more tokens, or have failed."""
        if not self.exist:
            return
        for request in list(self._batch.requests):
            if request.constraint is not None and request.finished is None and request.constraint.is_ready:
                self._end_if_over(request)

    def _end_if_over(self, request: RequestState) -> None:
        assert request.constraint is not None
        if (failure := request.constraint.failure) is not None:
            message, is_too_costly = failure
            self._outputs.finish(request, FinishReason.COSTLY if is_too_costly else FinishReason.FORBIDDEN, message)
        elif (reason := request.find_end()) is not None:
            self._outputs.end_late(request, reason)

    def sleep(self) -> bool:
        """Return whether all running rows wait for their masks. Then the next mask wakes the loop."""
        waiting = [each for each in self._batch.requests if each.sits_out]
        if not waiting or self._masks is None or self._batch.has_steps:
            return False
        self._masks.sleep()
        return not any(each.constraint is not None and each.constraint.is_ready for each in waiting)

    def need_masks(self, step: Step) -> bool:
        """Return whether the step must wait for `build_masks` before it samples."""
        return self.exist and any(work.num_logits and work.request.constraint is not None for work in step.work)

    def build_masks(self, step: Step) -> list[RowMask]:
        """Return the allowed tokens for each constrained row of the step. All earlier steps must be over.

        A row whose mask is not ready in time sits the step out, and so does a row that needs no more tokens.
        """
        if not self.exist:
            return []
        rows = _list_constrained(step)
        if self._masks is not None:
            quick = [constraint for _, request, constraint in rows if request.lateness < LATENESS_MAX]
            self._masks.wait(quick, MASK_WAIT_SECONDS)
        masks = []
        for index, request, constraint in rows:
            is_late = not constraint.is_ready
            # With states, a row begins again after a late mask. From then on it computes no token before its mask.
            request.is_late = is_late or (self._has_states and request.num_preemptions > 0)
            if is_late:
                request.lateness += _LATE
                step.sit_out(index)
                continue
            request.lateness = max(0, request.lateness - 1)
            if constraint.failure is None and not constraint.is_complete:
                masks.append(RowMask(request.row, constraint.build_mask()))
                continue
            step.sit_out(index)
            self._end_if_over(request)
        return masks


def _list_constrained(step: Step) -> list[tuple[int, RequestState, Constraint]]:
    """Return the index, the request and the constraint of each row that needs a mask in this step."""
    return [
        (index, work.request, work.request.constraint)
        for index, work in enumerate(step.work)
        if work.num_logits and work.is_wanted and work.request.constraint is not None
        and not work.request.finished and not work.request.steps_dummies
    ]  # fmt: skip
