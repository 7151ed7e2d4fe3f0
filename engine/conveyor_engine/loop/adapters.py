"""Loads and unloads LoRA adapters between steps, while requests run. Used by `core`.

If there are more adapters than slots (`scheduling.adapter_slots`), those that requests wait for are loaded in place of
others. A thread reads an adapter's files, for which no step waits. If its volume hangs, later adapters wait too. The
host keeps copies of what was read, within a share of its free memory. Then the adapter is loaded a few layers at a
time, so that it delays a step by about 10 milliseconds. When it is loaded for the first time, a trial request with it
runs beside the others, as in the warm-up.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from conveyor_engine.errors import ModelError, explain_crash
from conveyor_engine.loop.executor import AdapterCopy, TakesAdapters
from conveyor_engine.scheduling.adapter_slots import AdapterSlots
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.scheduling.tasks import Task
from conveyor_engine.wire.messages import AdapterFailed, AdapterLoaded, LoadAdapter
from conveyor_engine.wire.request import FinishReason, RequestOutput
from conveyor_protocol.failure_reasons import FailureReason

_TRIAL = "adapter-trial"
_TRIED_TOKENS = 4
_FIRST_LEVEL = -(1 << 31)  # below those of all requests
_LAYERS_SECONDS = 0.01  # for which one step waits; a layer more may be loaded
_READ_AHEAD = 2  # adapters that requests wait for
_COPIES_SHARE = 4  # of the host's free memory, one part is for copies
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
        self._slots = AdapterSlots(1, number) if scheduler.slots is None else scheduler.slots
        self._between_steps, self._wake = between_steps, wake
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter")
        self._usable = set(range(number + 1))  # 0: none
        self._known: dict[int, LoadAdapter] = {}
        self._coming: deque[LoadAdapter] = deque()  # those that are not usable yet
        self._leaving: set[int] = set()
        self._tried: set[int] = set()
        # With each read: whether no other copy was in memory.
        self._reads: dict[int, tuple[Future[AdapterCopy], bool]] = {}
        self._copies: OrderedDict[int, AdapterCopy] = OrderedDict()  # least recently used first
        self._signatures: dict[int, object] = {}
        self._next: int | None = None  # that requests wait for
        self._loading: tuple[int, Iterator[None]] | None = None
        self._trial: int | None = None
        self._is_stuck = False  # no slot can be taken before a step has run
        self._results: list[AdapterLoaded | AdapterFailed] = []

    def has(self, number: int) -> bool:
        """Return whether a new request may have this adapter."""
        return number in self._usable

    @property
    def is_due(self) -> bool:
        """Return whether `advance` has something to do. It may also be called at any other time."""
        if self._results or any(read.done() for read, _ in self._reads.values()) or self._find_gone():
            return True
        if self._loading is not None:
            return True
        return self._trial is None and (bool(self._coming and not self._reads) or self._misses)

    @property
    def _misses(self) -> bool:
        return self._slots.misses and not self._is_stuck

    def load(self, message: LoadAdapter) -> None:
        """Read the adapter after those that were named before, and load it if a slot is free."""
        self._known[message.number] = message
        self._coming.append(message)

    def unload(self, number: int) -> None:
        """Take no more requests for the adapter, and free its memory after the last one."""
        self._usable.discard(number)
        self._leaving.add(number)

    def advance(self, now: float) -> list[AdapterLoaded | AdapterFailed]:
        """Load the next layers, and free what no request needs. Returns what has become of adapters.

        now: as for `EngineCore.step`.
        """
        for number in self._find_gone():
            self._drop(number)
        self._take_reads()
        if self._loading is None and self._trial is None:
            self._choose()
        if self._loading is not None:
            self._load_layers(*self._loading, now)
        results, self._results = self._results, []
        return results

    # --- which adapter is next ---

    def _choose(self) -> None:
        """Begin to load an adapter that requests wait for, or else one that is new."""
        if self._misses:
            self._choose_wanted()
        if self._loading is None and self._coming and not self._reads:
            number = self._coming[0].number
            if number not in self._copies:
                self._read(number)
            elif self._slots.has_free:
                self._begin(number)
            else:
                self._settle(number)

    def _choose_wanted(self) -> None:
        self._slots.misses = False
        waiting = (request.adapter for request in self._scheduler.waiting.in_order())
        claims, wanted = self._slots.list_wanted(number for number in waiting if number in self._known)
        self._next = wanted[0] if wanted else None
        for number in wanted[:_READ_AHEAD]:
            self._read(number)
        in_use = {each.adapter for each in self._scheduler.requests.values() if each.was_admitted}
        victim = self._slots.find_victim(claims, wanted, in_use)
        ready = next((number for number in wanted if number in self._copies), None)
        if ready is not None and victim is not None:
            self._free_slot(victim)
        if ready is not None and self._slots.has_free:
            self._begin(ready)
        else:
            self._is_stuck = True

    def _begin(self, number: int) -> None:
        self._copies.move_to_end(number)
        self._loading = number, self._executor.load_adapter(number, self._copies[number])

    def _free_slot(self, number: int) -> None:
        self._slots.free(number)
        self._between_steps(partial(self._executor.unload_adapter, number))

    def _find_gone(self) -> list[int]:
        """Return the adapters that leave and that no request has."""
        busy = self._loading[0] if self._loading is not None else self._trial
        return [number for number in self._leaving if number != busy and not self._is_in_use(number)]

    def _is_in_use(self, number: int) -> bool:
        return any(request.adapter == number for request in self._scheduler.requests.values())

    def _drop(self, number: int) -> None:
        """Remove all that there is of an adapter."""
        if number in self._slots:
            self._free_slot(number)
        self._leaving.discard(number)
        self._usable.discard(number)
        self._tried.discard(number)
        for kept in (self._known, self._copies, self._signatures):
            kept.pop(number, None)

    # --- files and copies ---

    def _read(self, number: int) -> None:
        if number in self._copies or number in self._reads:
            return
        message = self._known[number]
        read = self._reader.submit(self._executor.read_adapter, message.name, message.directory)
        self._reads[number] = read, not self._copies and not self._reads
        read.add_done_callback(lambda _: self._wake())

    def _take_reads(self) -> None:
        for number in [number for number, (read, _) in self._reads.items() if read.done()]:
            (read, was_alone), self._is_stuck = self._reads.pop(number), False
            if number not in self._known:
                continue
            try:
                copy = read.result()
                if self._signatures.setdefault(number, copy.signature) != copy.signature:
                    raise copy.refuse(
                        "its files are others than those that were loaded first; put new files into a new folder",
                        FailureReason.MODEL_UNREADABLE,
                    )
            except Exception as error:
                reason, why = self._explain(number, error)
                if reason is not FailureReason.OUT_OF_MEMORY or was_alone:
                    self._fail(number, reason, why)
                    continue
                self._drop_copies()  # and read it again
            else:
                self._keep(number, copy)
            self._slots.misses = True

    def _keep(self, number: int, copy: AdapterCopy) -> None:
        """Keep the copy, and drop others that have not been used for long if all would take too much memory."""
        self._copies[number] = copy
        held = sum(each.num_bytes for each in self._copies.values())
        most = (self._executor.count_free_bytes() + held) // _COPIES_SHARE
        while held > most and len(self._copies) > 1:
            held -= self._copies.popitem(last=False)[1].num_bytes

    def _drop_copies(self) -> None:
        """Drop all copies but that of the next adapter, which is dropped once it is loaded."""
        for number in [*self._copies]:
            if number != self._next:
                del self._copies[number]

    # --- layers and the trial ---

    def _load_layers(self, number: int, layers: Iterator[None], now: float) -> None:
        try:
            if self._between_steps(partial(_load_some, layers)):
                return
        except Exception as error:  # nothing else uses what was written so far
            self._loading = None
            reason, why = self._explain(number, error)
            if reason is not FailureReason.OUT_OF_MEMORY or not self._make_room():
                self._fail(number, reason, why)
        else:
            self._end_loading(number, now)

    def _make_room(self) -> bool:
        """Let the next adapter take the place of another one. Returns False if there is none."""
        if not len(self._slots):
            return False
        self._slots.limit = len(self._slots)
        self._slots.misses = True
        return True

    def _end_loading(self, number: int, now: float) -> None:
        """Let waiting requests have the adapter, or try it first."""
        self._loading = None
        self._slots.put(number)
        self._slots.misses = True  # there may be more to load
        self._scheduler.look_again()
        if number in self._tried:
            self._settle(number)
        else:
            self._try(number, now)

    def _try(self, number: int, now: float) -> None:
        """Start the trial. It goes before all requests that wait, because until its end no other adapter is loaded."""
        dummy = self._task.build_dummy(0, _TRIED_TOKENS)
        self._scheduler.add_request(
            msgspec.structs.replace(dummy, request_id=_TRIAL, adapter=number, arrival_time=now, level=_FIRST_LEVEL),
            exceeds_queue=True,
        )
        self._trial = number

    def take_trial(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Return a step's outputs without those of the trial, which it judges."""
        self._is_stuck = False
        if self._trial is None:
            return outputs
        for output in outputs:
            if output.request_id == _TRIAL and output.finish_reason is not None:
                self._judge(self._trial, output.finish_reason)
        return [output for output in outputs if output.request_id != _TRIAL]

    def _judge(self, number: int, reason: FinishReason) -> None:
        self._trial = None
        if reason is FinishReason.ERROR:
            name = self._known[number].name
            why = f"the adapter {name!r} cannot be used: with it, the model's results are not finite (NaN or infinity)"
            self._fail(number, FailureReason.UNSUPPORTED_MODEL, why)
        else:
            self._tried.add(number)
            self._settle(number)

    def _settle(self, number: int) -> None:
        """Let requests have the adapter."""
        if self._end_coming(number):
            self._usable.add(number)
            self._results.append(AdapterLoaded(number))

    def _explain(self, number: int, error: Exception) -> tuple[FailureReason, str]:
        if isinstance(error, ModelError):
            return error.reason, str(error)
        reason, why = explain_crash(error)
        return reason, f"the adapter {self._known[number].name!r} cannot be used: {why}"

    def _fail(self, number: int, reason: FailureReason, message: str) -> None:
        """End the requests that wait for the adapter. Others that have it end as usual."""
        self._end_coming(number)
        self.unload(number)
        self._scheduler.fail_waiting(number, message)
        self._results.append(AdapterFailed(number, reason, message))

    def _end_coming(self, number: int) -> bool:
        """Return whether the adapter was new until now."""
        if found := [message for message in self._coming if message.number == number]:
            self._coming.remove(found[0])
        return bool(found)


def _load_some(layers: Iterator[None]) -> bool:
    """Load layers for a while. Returns whether there are more."""
    end = time.monotonic() + _LAYERS_SECONDS
    return any(time.monotonic() >= end for _ in layers)
