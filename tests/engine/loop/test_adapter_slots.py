"""Random histories of more adapters than slots: what a step uses is loaded, and no request waits for ever."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.builders import make_request, make_scheduler
from tests.engine.executors import AtOnce
from tests.engine.pretended_model import PretendedModel

from conveyor_engine.errors import ModelError, Overloaded
from conveyor_engine.loop import adapters as loop_adapters
from conveyor_engine.loop.adapters import Adapters
from conveyor_engine.loop.executor import Sample
from conveyor_engine.loop.step_runner import run_step
from conveyor_engine.scheduling.adapter_slots import AdapterSlots
from conveyor_engine.scheduling.tasks import build_task
from conveyor_engine.wire.messages import AdapterFailed, AdapterLoaded, LoadAdapter
from conveyor_engine.wire.request import FinishReason
from conveyor_engine.wire.step import StepPlan
from conveyor_protocol.failure_reasons import FailureReason

LONGEST = 5  # steps of an answer


class Copy(NamedTuple):
    num_bytes: int
    signature: str

    def refuse(self, why: str, reason: FailureReason) -> ModelError:
        return ModelError(why, reason=reason)


class Device(PretendedModel):
    """Has at most `num_slots` adapters, and memory for `room` of them. Fails if a row uses another one.

    An adapter can be read only if the host has fewer than `most_copies`.
    """

    def __init__(self, num_slots: int, free_bytes: int) -> None:
        super().__init__(block_size=4)
        self.num_slots = self.room = num_slots
        self.free_bytes = free_bytes
        self.loaded: set[int] = set()
        self.num_loads = 0
        self.of_row: dict[int, int] = {}
        self.lost: set[str] = set()  # directories
        self.no_room: Exception = ModelError("no room", reason=FailureReason.OUT_OF_MEMORY)
        self.most_copies = 1000
        self.count_copies: Callable[[], int] = lambda: 0
        self.signature = "first"

    def count_free_bytes(self) -> int:
        return self.free_bytes

    def read_adapter(self, name: str, directory: str) -> Copy:
        if directory in self.lost:
            raise ModelError(f"no {name}", reason=FailureReason.MODEL_NOT_FOUND)
        if self.count_copies() >= self.most_copies:
            raise ModelError("no room to read it", reason=FailureReason.OUT_OF_MEMORY)
        return Copy(1 << 20, self.signature)

    def load_adapter(self, number: int, copy: Copy) -> Iterator[None]:
        yield
        if len(self.loaded) >= self.room:
            raise self.no_room
        self.loaded.add(number)
        self.num_loads += 1
        assert len(self.loaded) <= self.num_slots

    def unload_adapter(self, number: int) -> None:
        self.loaded.remove(number)

    def begin(self, plan: StepPlan) -> Sample:
        self.of_row |= {admitted.row: admitted.adapter for admitted in plan.admitted}
        used = {self.of_row[row] for row in plan.rows} - {0}
        if not used <= self.loaded:
            self.wrong.append(AssertionError(f"{used} of {self.loaded}"))
        return super().begin(plan)


class Engine:
    """A scheduler and its adapters. `turn` is a turn of the engine's loop."""

    def __init__(self, num_slots: int, num_adapters: int, *, free_bytes: int = 1 << 40, **changes: Any) -> None:
        self.device, self.num_slots = Device(num_slots, free_bytes), num_slots
        self.slots = AdapterSlots(num_slots, 0)
        sizes = {"num_kv_blocks": 400, "max_num_seqs": 64, "max_num_batched_tokens": 512}
        changes = sizes | {"max_num_queued_requests": 10_000} | changes
        self.scheduler = make_scheduler(slots=self.slots, block_size=4, **changes)
        task = build_task(self.scheduler._facts)
        self.adapters = Adapters(self.device, self.scheduler, task, 0, lambda work: work(), lambda: None)
        self.adapters._reader = AtOnce()  # type: ignore[assignment]
        self.device.count_copies = lambda: len(self.adapters._copies) + len(self.adapters._reads)
        self.now, self.num_turns, self.num_sent = 0.0, 0, 0
        self.ended: dict[str, FinishReason] = {}
        self.waits: dict[str, tuple[int, int]] = {}  # turn of arrival, and the limit of turns
        self.results: list[AdapterLoaded | AdapterFailed] = []
        for number in range(1, num_adapters + 1):
            self.adapters.load(LoadAdapter(number, f"a{number}", f"/{number}"))
        while self.adapters.is_due or self.scheduler.has_unfinished():
            self.turn()
        assert self.results == [AdapterLoaded(number) for number in range(1, num_adapters + 1)]

    def send(self, adapter: int, max_tokens: int = LONGEST, level: int = 0) -> str:
        name = f"{self.num_sent}"
        self.num_sent += 1
        sent = {"max_tokens": max_tokens, "adapter": adapter, "arrival_time": self.now, "level": level}
        request = make_request(name, 3, **sent)
        self.scheduler.add_request(request)
        ahead = len({each.adapter for each in self.scheduler.waiting.in_order()})
        rounds = -(-ahead // self.num_slots)
        self.waits[name] = self.num_turns, rounds * (LONGEST + 2 * self.num_slots + 3)
        return name

    def turn(self) -> None:
        self.now += 1.0
        self.num_turns += 1
        self.results += self.adapters.advance(self.now)
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            run_step(self.scheduler, self.device, plan)
        for output in self.adapters.take_trial(self.scheduler.take_outputs()):
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason
        assert not self.device.wrong
        assert self.device.loaded >= set(self.slots)
        self._check_waits()

    def _check_waits(self) -> None:
        for request in self.scheduler.waiting.in_order():
            if request.request_id in self.waits and not request.was_admitted:
                arrival, limit = self.waits[request.request_id]
                assert self.num_turns - arrival <= limit, f"{request.adapter} waits"

    def drain(self) -> None:
        while self.scheduler.has_unfinished():
            self.turn()


@given(
    num_slots=st.integers(1, 4),
    sent=st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, LONGEST)), max_size=4), max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_no_request_waits_longer_than_its_turn(num_slots: int, sent: Sequence[Sequence[tuple[int, int]]]) -> None:
    engine = Engine(num_slots, 9)
    for requests in sent:
        for adapter, max_tokens in requests:
            engine.send(adapter, max_tokens)
        engine.turn()
    engine.drain()
    assert set(engine.ended) == {f"{number}" for number in range(engine.num_sent)}
    assert set(engine.ended.values()) <= {FinishReason.LENGTH}


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_popular_adapters_do_not_keep_the_slots(num_slots: int) -> None:
    """Each of them has a request at any time, so without turns the other one would never get a slot."""
    engine = Engine(num_slots, 9)
    popular = range(1, num_slots + 1)
    for _ in range(3):
        for adapter in popular:
            engine.send(adapter)
        engine.turn()
    rare = engine.send(9)
    while rare not in engine.ended:
        for adapter in popular:
            engine.send(adapter)
        engine.turn()
    engine.drain()


@given(
    num_slots=st.integers(1, 3),
    mode=st.sampled_from(("continuous", "none", "static", "dynamic")),
    sent=st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=5, max_size=40),
    num_kv_blocks=st.sampled_from((12, 20, 400)),
    removed=st.integers(0, 6),
    room=st.integers(1, 3),
    most_copies=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_every_request_ends_in_each_mode_also_if_its_adapter_is_removed_or_memory_is_short(
    num_slots: int,
    mode: str,
    sent: Sequence[Sequence[int]],
    num_kv_blocks: int,
    removed: int,
    room: int,
    most_copies: int,
) -> None:
    window = 3.0 if mode in ("static", "dynamic") else None
    changes = {"max_num_seqs": 1 if mode == "none" else 4, "max_num_batched_tokens": 16}
    engine = Engine(num_slots, 6, mode=mode, batching_window_seconds=window, num_kv_blocks=num_kv_blocks, **changes)
    engine._check_waits = lambda: None  # type: ignore[method-assign]  # rows and blocks are scarce
    for number in [*engine.slots][room:]:
        engine.adapters._free_slot(number)
    engine.device.room, engine.device.most_copies = room, most_copies
    engine.adapters._copies.clear()
    for number, adapters in enumerate(sent):
        for adapter in adapters:
            if engine.adapters.has(adapter):
                engine.send(adapter)
        if number == 3 and removed:
            engine.adapters.unload(removed)
        engine.turn()
    engine.drain()
    assert set(engine.ended) == {f"{number}" for number in range(engine.num_sent)}
    assert set(engine.ended.values()) <= {FinishReason.LENGTH}
    engine.turn()
    assert removed not in engine.device.loaded


def test_a_new_adapter_is_tried_although_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_adapters, "_LAYERS_SECONDS", 0.0)  # one layer between two steps
    engine = Engine(2, 4, max_num_seqs=2, max_num_queued_requests=10)
    engine._check_waits = lambda: None  # type: ignore[method-assign]  # rows are scarce
    engine.adapters.unload(1)
    engine.turn()
    engine.adapters.load(LoadAdapter(5, "a5", "/5"))
    while engine.adapters._loading is None:
        engine.turn()
    for _ in range(12):
        engine.send(3)
    with pytest.raises(Overloaded):
        engine.send(3)
    for _ in range(100):
        engine.turn()
    assert AdapterLoaded(5) in engine.results
    assert len(engine.ended) == 12
    assert not engine.adapters.is_due


def test_a_trial_waits_for_no_other_request() -> None:
    """Until it ends, no other adapter is loaded."""
    engine = Engine(2, 4, max_num_seqs=2)
    engine._check_waits = lambda: None  # type: ignore[method-assign]  # rows are scarce
    names = [engine.send(3), engine.send(4)]
    for _ in range(100):
        engine.send(0)
    for _ in range(3 * LONGEST):
        engine.turn()
    assert set(names) <= set(engine.ended)


def test_the_adapter_that_was_not_used_for_the_longest_time_is_replaced() -> None:
    engine = Engine(2, 4)
    before = engine.device.num_loads
    for adapter in (1, 2, 1, 3, 1):
        engine.send(adapter)
        engine.drain()
    assert engine.device.loaded == {1, 3}
    assert engine.device.num_loads == before + 1


@pytest.mark.parametrize("is_crash", [False, True])
def test_an_adapter_without_memory_waits_for_the_place_of_another_one(is_crash: bool) -> None:
    """is_crash: the error is that of an allocation, as on a GPU."""
    engine = Engine(3, 4)
    engine.device.no_room = MemoryError() if is_crash else engine.device.no_room
    engine.adapters._free_slot(3)
    engine.device.room = 2
    names = [engine.send(adapter) for adapter in (1, 2)]
    engine.turn()
    names += [engine.send(adapter) for adapter in (3, 4, 1)]
    engine.drain()
    assert engine.ended == dict.fromkeys(names, FinishReason.LENGTH)
    engine.device.room = 3
    for adapter in (1, 2, 3):
        engine.send(adapter)
        engine.drain()
    assert engine.device.loaded == {1, 2, 3}, "memory is tried again"


def test_new_adapters_without_memory_wait_for_their_first_requests() -> None:
    engine = Engine(3, 2)
    engine.device.room = 2
    for number in (3, 4):
        engine.adapters.load(LoadAdapter(number, f"a{number}", f"/{number}"))
        while engine.adapters.is_due:
            engine.turn()
    assert engine.results[2:] == [AdapterLoaded(3), AdapterLoaded(4)]
    names = [engine.send(adapter) for adapter in (3, 4)]
    engine.drain()
    assert engine.ended == dict.fromkeys(names, FinishReason.LENGTH)


def test_copies_of_others_make_room_to_read_an_adapter() -> None:
    engine = Engine(2, 4)
    engine.device.most_copies = 1
    engine.adapters.load(LoadAdapter(5, "a5", "/5"))
    names = [engine.send(adapter) for adapter in (1, 2, 3, 4)]
    while engine.adapters.is_due or engine.scheduler.has_unfinished():
        engine.turn()
    assert engine.ended == dict.fromkeys(names, FinishReason.LENGTH)
    assert engine.results[4:] == [AdapterLoaded(5)]


def test_a_copy_that_waits_behind_another_adapter_makes_room_for_it() -> None:
    engine = Engine(1, 3)
    engine._check_waits = lambda: None  # type: ignore[method-assign]
    engine.device.most_copies = 1
    engine.adapters._copies.clear()
    names = [engine.send(1, 9)]
    engine.turn()
    names.append(engine.send(2))
    for _ in range(3):
        engine.turn()
    assert list(engine.adapters._copies) == [2]
    names.append(engine.send(3, level=-1))
    engine.drain()
    assert engine.ended == dict.fromkeys(names, FinishReason.LENGTH)


def test_an_adapter_that_cannot_be_read_without_copies_fails() -> None:
    engine = Engine(2, 2)
    engine.device.most_copies = 0
    engine.adapters.load(LoadAdapter(3, "a3", "/3"))
    while engine.adapters.is_due:
        engine.turn()
    assert engine.results[2:] == [AdapterFailed(3, FailureReason.OUT_OF_MEMORY, "no room to read it")]


def test_an_adapter_without_memory_fails_if_it_is_the_only_one() -> None:
    engine = Engine(1, 2)
    engine.device.room = 0
    kept, lost = engine.send(1), engine.send(2)
    engine.drain()
    assert engine.ended == {kept: FinishReason.LENGTH, lost: FinishReason.ERROR}
    assert engine.results[2:] == [AdapterFailed(2, FailureReason.OUT_OF_MEMORY, "no room")]


def test_files_that_are_gone_end_the_requests_that_wait_for_them_and_no_other() -> None:
    engine = Engine(1, 3, free_bytes=0)  # one copy is kept
    engine.device.lost = {"/2"}
    kept, lost, other = engine.send(1), engine.send(2), engine.send(3)
    engine.drain()
    assert engine.ended == {kept: FinishReason.LENGTH, lost: FinishReason.ERROR, other: FinishReason.LENGTH}
    assert engine.results[3:] == [AdapterFailed(2, FailureReason.MODEL_NOT_FOUND, "no a2")]
    assert [engine.adapters.has(number) for number in (1, 2, 3)] == [True, False, True]


def test_files_that_have_changed_are_not_loaded_under_the_old_number() -> None:
    engine = Engine(1, 2, free_bytes=0)
    engine.send(2)
    engine.drain()
    engine.device.signature = "second"
    name = engine.send(1)
    engine.drain()
    assert engine.ended[name] is FinishReason.ERROR
    (failed,) = engine.results[2:]
    assert isinstance(failed, AdapterFailed)
    assert "put new files into a new folder" in failed.message


def test_copies_take_a_share_of_the_host_s_memory() -> None:
    engine = Engine(1, 20)
    assert len(engine.adapters._copies) == 20
    engine.device.free_bytes = 0
    engine.adapters.load(LoadAdapter(21, "new", "/21"))
    while engine.adapters.is_due:
        engine.turn()
    assert list(engine.adapters._copies) == [17, 18, 19, 20, 21]
