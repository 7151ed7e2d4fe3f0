"""Executors around an executor: as in another process, without waiting, or with errors that come late."""

from collections.abc import Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future
from typing import Any

import msgspec

from conveyor_engine.loop.executor import Read, Sample
from conveyor_engine.wire.step import RowMask, StepPlan, StepResult


class Wired:
    """Runs an executor as if it were in another process: every plan and every result is encoded as msgpack."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def begin(self, plan: StepPlan) -> Sample:
        arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        begun = self._executor.begin(arrived)

        def sample(masks: Sequence[RowMask]) -> Read:
            result = begun(msgspec.msgpack.decode(msgspec.msgpack.encode(masks), type=list[RowMask]))
            return lambda: msgspec.msgpack.decode(msgspec.msgpack.encode(result()), type=StepResult)

        return sample


class AtOnce(Pool):
    """An executor that runs each step before it returns, like a device that is faster than its caller."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class FailsLate:
    """An executor that raises only when a result is read, as a GPU does."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.num_errors = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def begin(self, plan: StepPlan) -> Sample:
        begun = AtOnce().submit(self._executor.begin, plan)

        def sample(masks: Sequence[RowMask]) -> Read:
            sampled = begun if begun.exception() else AtOnce().submit(begun.result(), masks)

            def read() -> StepResult:
                self.num_errors += sampled.exception() is not None
                return sampled.result()()

            return read

        return sample
