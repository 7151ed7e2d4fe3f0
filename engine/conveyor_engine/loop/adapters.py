"""Loads and unloads LoRA adapters between steps, while requests run. Used by `core`.

A thread reads an adapter's files, for which no step waits. If its volume hangs, later adapters wait too. Then the
adapter is loaded one layer at a time, so that it delays a step by a few milliseconds, and a trial request with it runs
beside the others, as in the warm-up. An adapter is unloaded once no request has it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from conveyor_engine.errors import ModelError, Overloaded, explain_crash
from conveyor_engine.loop.executor import TakesAdapters
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.scheduling.tasks import Task
from conveyor_engine.wire.messages import AdapterFailed, AdapterLoaded, LoadAdapter
from conveyor_engine.wire.request import FinishReason, RequestOutput
from conveyor_protocol.failure_reasons import FailureReason

_TRIAL = "adapter-trial"
_TRIED_TOKENS = 4
_END = object()
_Call = Callable[[Callable[[], Any]], Any]


class Adapters:
    """The adapters that requests may have, by their numbers, and those that come and go."""

    def __init__(
        self,
        executor: TakesAdapters,
        scheduler: Scheduler,
        task: Task,
        number: int,
        between_steps: _Call,
        wake: Callable[[], None],
    ) -> None:
        """number: of the adapters that were loaded at the start, which have the numbers from 1 on.

        between_steps: calls a function while no step begins, because that reads what the function may change.
        wake: called in another thread when `advance` has something to do.
        """
        self._executor, self._scheduler, self._task = executor, scheduler, task
        self._between_steps, self._wake = between_steps, wake
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter")
        self._usable = set(range(number + 1))  # 0: none
        self._waiting: deque[LoadAdapter] = deque()
        self._loading: LoadAdapter | None = None
        self._layers: Future[Iterator[None]] | None = None
        self._is_on_trial = False
        self._leaving: set[int] = set()
        self._results: list[AdapterLoaded | AdapterFailed] = []

    def has(self, number: int) -> bool:
        """Return whether a new request may have this adapter."""
        return number in self._usable

    @property
    def is_due(self) -> bool:
        """Return whether `advance` has something to do. It may also be called at any other time."""
        loads = bool(self._waiting) if self._loading is None else self._is_read
        return loads or bool(self._results) or any(not self._is_in_use(number) for number in self._leaving)

    def load(self, message: LoadAdapter) -> None:
        """Load the adapter after those that were named before."""
        self._waiting.append(message)

    def unload(self, number: int) -> None:
        """Take no more requests for the adapter, and free its memory after the last one."""
        self._usable.discard(number)
        self._leaving.add(number)

    def advance(self, now: float) -> list[AdapterLoaded | AdapterFailed]:
        """Load the next layer, and free what no request needs. Returns what has become of adapters.

        now: as for `EngineCore.step`.
        """
        for number in [number for number in self._leaving if not self._is_in_use(number)]:
            self._leaving.discard(number)
            self._between_steps(partial(self._executor.unload_adapter, number))
        if self._loading is None and self._waiting:
            self._loading = message = self._waiting.popleft()
            named = message.number, message.name, message.directory
            self._layers = self._reader.submit(self._executor.load_adapter, *named)
            self._layers.add_done_callback(lambda _: self._wake())
        if self._is_read:
            self._load_layer(now)
        results, self._results = self._results, []
        return results

    @property
    def _is_read(self) -> bool:
        """Return whether a layer can be loaded, or the trial can start."""
        return self._layers is not None and self._layers.done() and not self._is_on_trial

    def _load_layer(self, now: float) -> None:
        assert self._loading is not None
        assert self._layers is not None
        try:
            layers = self._layers.result()
            if self._between_steps(lambda: next(layers, _END)) is _END:
                self._try(now)
        except ModelError as error:
            self._fail(error.reason, str(error))
        except Exception as error:  # nothing else uses what was written so far
            reason, why = explain_crash(error)
            self._fail(reason, f"the adapter {self._loading.name!r} cannot be used: {why}")

    def take_trial(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Return the outputs without those of the trial, which it judges."""
        if not self._is_on_trial:
            return outputs
        for output in outputs:
            if output.request_id == _TRIAL and output.finish_reason is not None:
                self._judge(output.finish_reason)
        return [output for output in outputs if output.request_id != _TRIAL]

    def _is_in_use(self, number: int) -> bool:
        return any(request.adapter == number for request in self._scheduler.requests.values())

    def _try(self, now: float) -> None:
        """Start the trial. If the queue is full, the next call of `advance` comes here again."""
        assert self._loading is not None
        dummy = self._task.build_dummy(0, _TRIED_TOKENS)
        number = self._loading.number
        trial = msgspec.structs.replace(dummy, request_id=_TRIAL, adapter=number, arrival_time=now)
        try:
            self._scheduler.add_request(trial)
        except Overloaded:
            return
        self._is_on_trial = True

    def _judge(self, reason: FinishReason) -> None:
        assert self._loading is not None
        self._is_on_trial = False
        number, name = self._loading.number, self._loading.name
        if reason is FinishReason.ERROR:
            self._leaving.add(number)
            why = f"the adapter {name!r} cannot be used: with it, the model's results are not finite (NaN or infinity)"
            self._fail(FailureReason.UNSUPPORTED_MODEL, why)
        else:
            self._usable.add(number)
            self._end(AdapterLoaded(number))

    def _fail(self, reason: FailureReason, message: str) -> None:
        assert self._loading is not None
        self._end(AdapterFailed(self._loading.number, reason, message))

    def _end(self, result: AdapterLoaded | AdapterFailed) -> None:
        self._loading = self._layers = None
        self._results.append(result)
