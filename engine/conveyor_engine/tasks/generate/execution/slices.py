"""Encodes pictures beside steps, a slice at a time, so that no step waits for a whole picture.

The runner calls it after each step of a CPU for the pictures that the plan names (`StepPlan.wanted_pictures`). The
encoder of transformers is one call. It runs in a thread of its own, which stops between two functions of torch until
the runner gives it time again. The two threads never compute at the same time.
"""

import logging
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from conveyor_engine.tasks.generate.execution.sight import Features, Sight
from conveyor_engine.wire.pictures import decode_pictures
from conveyor_engine.wire.step import StepPlan, WantedPicture

# Seconds of encoding after a step, for each second of the step: for each picture that is waited for, and at most.
SHARE: Final = 0.2
_SHARE_MAX: Final = 1.0
FIRST_SHARE: Final = 4.0  # of pictures that go first. After the usual share, the slice ends with the next picture
_ALONE_SECONDS: Final = 0.02  # of encoding in a step without rows: what a new request waits for at most
_log = logging.getLogger(__name__)


class SlicedEncoder:
    """The picture that is being encoded, and the time that the encoder may still use."""

    def __init__(self, sight: Sight, has_goal: bool = False) -> None:
        """has_goal: whether inter-token latency has an objective, which changes rows. Fewer make no slice shorter."""
        self._sight, self._has_goal = sight, has_goal
        self._thread = EncoderThread()
        self._call: SlicedCall | None = None
        self._digest = b""  # of the picture that the call encodes
        self._seconds = 0.0  # negative after a slice that took longer: one function of torch is never cut

    def encode(self, plan: StepPlan, step_seconds: float | None) -> list[bytes]:
        """Encode the plan's pictures for a share of the step's time. Returns the digests of those that are done.

        None is begun whose features would take the place of held ones. A picture whose encoding raises counts as done:
        the step of its tokens encodes it again, and fails with its request. step_seconds: None: the step has no rows.
        """
        wanted = plan.wanted_pictures
        usual = min(_SHARE_MAX, SHARE * len(wanted))
        share = FIRST_SHARE if plan.images_first and not self._has_goal else usual
        self._seconds = _ALONE_SECONDS if step_seconds is None else min(0.0, self._seconds) + share * step_seconds
        most = self._seconds
        if self._call is not None and self._digest not in {each.digest for each in wanted}:
            self._call.cancel()
            self._call = None
        needed = (*plan.held_pictures, *(each.digest for each in wanted))
        done = {digest for digest in needed if self._sight.has_kept(digest)}
        for each in wanted:
            if each.digest in done:
                continue
            if self._call is None and not self._sight.has_room(each.num_tokens, done):
                break  # a smaller one must not overtake it again and again
            if self._go_on(each):
                done.add(each.digest)
                if plan.images_first and step_seconds is not None and most - self._seconds >= usual * step_seconds:
                    break
        return [each.digest for each in wanted if each.digest in done]

    def _go_on(self, wanted: WantedPicture) -> bool:
        """Encode the picture until the time is over, unless another is being encoded. Returns whether it is done."""
        if self._seconds <= 0.0 or (self._call is not None and self._digest != wanted.digest):
            return False
        began = perf_counter()
        if self._call is None:
            self._call, self._digest = SlicedCall(lambda: self._encode(wanted), self._thread), wanted.digest
        is_done = self._call.run(self._seconds)
        self._seconds -= perf_counter() - began
        if is_done:
            call, self._call = self._call, None
            if call.error is None:
                self._sight.keep(wanted.digest, call.result)
            else:
                _log.error("event=encoding_failed error=%r", call.error)
        return is_done

    def _encode(self, wanted: WantedPicture) -> Features:
        """Called in the encoder's thread."""
        pictures = decode_pictures(wanted.payload)
        return self._sight.encode(next(each.picture for each in pictures if each.span.digest == wanted.digest))


class EncoderThread:
    """A thread for one call after the other. It is started at the first one, and ends with this object.

    It is kept for all calls, because torch gives each thread OpenMP threads of its own, which take time to start.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] | None = None

    def make(self, call: Callable[[], None]) -> None:
        """Begin the call when the one before has ended. Raises RuntimeError if the process may have no more threads."""
        if self._calls is None:
            calls = SimpleQueue[Callable[[], None] | None]()
            threading.Thread(target=_make_calls, args=(calls,), name="encoder", daemon=True).start()
            weakref.finalize(self, calls.put, None)
            self._calls = calls
        self._calls.put(call)


def _make_calls(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # has the encoder's result


class SlicedCall:
    """A call that a thread makes while `run` waits for it."""

    def __init__(self, call: Callable[[], Features], thread: EncoderThread) -> None:
        self.result: Features = ()
        self.error: Exception | None = None
        self._call, self._is_done, self._is_cancelled = call, False, False
        self._until = 0.0
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        try:
            thread.make(self._work)
        except RuntimeError as error:
            self.error, self._is_done = error, True

    def run(self, seconds: float) -> bool:
        """Let the call run for so many seconds, and until its present function of torch ends. Returns whether it is
        done."""
        if not self._is_done:
            self._until = perf_counter() + seconds
            self._go.release()
            self._stopped.acquire()
        return self._is_done

    def cancel(self) -> None:
        """End the call where it has stopped."""
        self._is_cancelled = True
        self.run(0.0)

    def stop(self) -> None:
        """Stop the thread if its time is over. Called by the thread. A cancelled call cleans up without a stop."""
        if self._is_cancelled or perf_counter() < self._until:
            return
        self._stopped.release()
        self._go.acquire()
        if self._is_cancelled:
            raise _Cancelled

    def _work(self) -> None:
        self._go.acquire()
        try:
            with torch.inference_mode(), _Stops(self):
                self.result = self._call()
        except _Cancelled:
            pass
        except Exception as error:  # the model may raise anything
            error.__traceback__ = None  # refers to tensors
            self.error = error
        self._is_done = True
        self._stopped.release()


class _Cancelled(BaseException):
    pass


class _Stops(TorchFunctionMode):
    """Lets a thread stop behind each function of torch."""

    def __init__(self, call: SlicedCall) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, function: Any, _: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        self._call.stop()
        return result
