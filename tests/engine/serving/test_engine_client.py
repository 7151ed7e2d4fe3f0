"""Tests the API process's view of the engine, with a fake process or only its messages, without a server."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from tests.engine.builders import make_facts, make_request

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import EngineDead, ErrorCode, NoPlace, Overloaded, Unavailable
from conveyor_engine.serving.engine_client import HEARTBEAT_LATE_SECONDS, STEP_STUCK_SECONDS, EngineClient, State
from conveyor_engine.serving.generation import Generation
from conveyor_engine.serving.held_requests import HELD_TOKENS_MAX
from conveyor_engine.serving.http.app import build_app
from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.http.usage import UsageReports
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.pool import WorkerPool
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.wire.messages import Drain, Heartbeat, Ready, Refused, StepOutputs
from conveyor_engine.wire.request import EngineRequest, EngineStats, FinishReason, RequestOutput
from conveyor_engine.wire.worker import Part
from conveyor_protocol.request_headers import PLACE_IF_FREE


@asynccontextmanager
async def running(
    on_step: Callable[[StepOutputs], None] = lambda _: None, device: str = "cpu"
) -> AsyncIterator[EngineClient]:
    """Start an engine. It is not ready yet."""
    config = EngineConfig(model="m", device=device)  # type: ignore[arg-type]
    engine = EngineClient(config, on_step, "tests.engine.serving.few_words")
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def open_generation(engine: EngineClient, request: EngineRequest) -> Generation:
    return engine.open_generation([Part.of([request])], 100)


@asynccontextmanager
async def connected(**config: int) -> AsyncIterator[EngineClient]:
    """A ready engine with one row, whose process is only a socket that nobody reads."""
    engine = EngineClient(EngineConfig(model="m", **config))  # type: ignore[arg-type]
    engine._handle(Ready(make_facts(max_num_seqs=1), 0.0))
    ours, theirs = socket.socketpair()
    with theirs:
        await engine._process.connect(ours)
        yield engine
        engine._process.close()


async def test_an_engine_with_unreadable_messages_is_dead_and_its_requests_fail() -> None:
    def fail(_: StepOutputs) -> None:
        raise ValueError("who could have known")

    async with running(fail) as engine:
        while engine.state is State.STARTING:  # noqa: ASYNC110  a state has no event
            await asyncio.sleep(0.05)
        with engine.hold_place():
            generation = open_generation(engine, make_request())
        async with generation:
            with pytest.raises(EngineDead, match="who could have known"):
                _ = [batch async for batch in generation.batches()]
        assert engine.dead.is_set()
        with pytest.raises(Unavailable, match="has stopped"), engine.hold_place():
            pass


async def test_the_last_message_of_a_dying_engine_is_read_without_a_reader() -> None:
    async with running(device="cuda") as engine:
        process = engine._process._process
        assert process is not None
        with suppress(ChildProcessError):  # asyncio was faster
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  the loop must not hear
        engine._process.send(Drain())
        await engine.dead.wait()
        assert engine.death is not None
        assert engine.death.reason == "NoDevice"


def ended(request_id: str) -> StepOutputs:
    """Return the step in which the engine sends the last output of an aborted request."""
    return StepOutputs([RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT)], EngineStats(), 1)


def finished(request_id: str) -> StepOutputs:
    """Return the step in which the engine sends a result."""
    output = RequestOutput(request_id=request_id, finish_reason=FinishReason.STOP, payload=b"x")
    return StepOutputs([output], EngineStats(), 1)


async def test_a_request_that_leaves_keeps_its_place_until_the_engine_has_ended_it() -> None:
    async with connected(max_num_queued_requests=1) as engine:
        for name in ("a", "b"):
            with engine.hold_place():
                generation = open_generation(engine, make_request(name))
            async with generation:
                pass
        assert engine.num_open == 0
        engine._handle(StepOutputs([], EngineStats(), 2))
        with pytest.raises(Overloaded, match="2 requests are arriving"), engine.hold_place():
            pass
        engine._handle(ended("a"))
        with engine.hold_place():
            pass


async def test_an_adapter_has_requests_until_the_last_one_is_closed() -> None:
    async with connected() as engine:
        parts = [Part.of([make_request(name, adapter=2)]) for name in ("a", "b", "c")]
        with engine.hold_place():
            generation = engine.open_generation(parts, 100)
        async with generation:
            assert generation.unsent
            assert [engine.has_requests(number) for number in (1, 2)] == [False, True]
            for name in ("a", "b"):
                engine._handle(finished(name))
            assert not generation.unsent
            assert engine.has_requests(2)
        assert not engine.has_requests(2)


async def test_prompts_wait_up_to_a_bound_of_tokens_also_those_whose_clients_left() -> None:
    async with connected() as engine:
        half = HELD_TOKENS_MAX // 2
        for name in ("a", "b"):
            with engine.hold_place():
                async with engine.open_generation([Part({name: half}, b"")], 100):
                    pass
        with pytest.raises(Overloaded, match="they would have more than 16777216"), engine.hold_place():
            pass
        engine._handle(ended("a"))
        with engine.hold_place(), pytest.raises(Overloaded, match=f"have {half} tokens"):
            engine.open_generation([Part({"c": half - 1, "d": 2}, b"")], 100)
        with engine.hold_place():
            engine.open_generation([Part({"c": half - 1, "d": 1}, b"")], 100)


async def test_a_request_that_is_refused_leaves_no_tokens_behind() -> None:
    async with connected() as engine:
        with engine.hold_place():
            generation = engine.open_generation([Part({"a": HELD_TOKENS_MAX}, b"")], 100)
        engine._handle(Refused(["a"], "full", overloaded=True, param=None, code=ErrorCode.QUEUE_FULL))
        async with generation:
            with pytest.raises(Overloaded, match="full"):
                _ = [batch async for batch in generation.batches()]
        with engine.hold_place():
            pass


async def test_a_request_that_is_larger_than_the_bound_is_taken_when_it_is_alone() -> None:
    async with connected() as engine:
        with engine.hold_place():
            engine.open_generation([Part({f"choice-{n}": HELD_TOKENS_MAX for n in range(2)}, b"")], 100)


def list_of(name: str, number: int, tokens: int = 1) -> list[Part]:
    """Return a list of inputs in parts of one input."""
    return [Part({f"{name}{n}": tokens}, f"{name}{n}|".encode()) for n in range(number)]


async def test_a_long_list_is_sent_a_part_at_a_time_and_takes_two_batches_of_places() -> None:
    async with connected(max_num_queued_requests=3) as engine:
        with engine.hold_place():
            generation = engine.open_generation(list_of("a", 9), 100)
        assert (len(engine._held), len(generation.unsent), engine._held.num_tokens) == (2, 7, 9), "one row: two places"
        with engine.hold_place():
            other = engine.open_generation(list_of("b", 2), 100)
        for number in range(9):
            engine._handle(finished(f"a{number}"))
            assert len(engine._held) == min(2, 8 - number) + 2, "the next part takes the place of the one that ended"
        for number in range(2):
            engine._handle(finished(f"b{number}"))
        async with generation, other:
            names = [o.request_id async for batch in generation.batches() for o in batch]
        assert names == [f"a{number}" for number in range(9)]
        assert (len(engine._held), engine._held.num_tokens, engine.num_open) == (0, 0, 0)


async def test_parts_of_a_client_that_left_are_never_sent() -> None:
    async with connected() as engine:
        with engine.hold_place():
            generation = engine.open_generation(list_of("a", 9, 100), 100)
        held: list[int] = []
        generation.on_held = held.append
        async with generation:
            pass
        assert (len(engine._held), engine._held.num_tokens) == (2, 200), "those that the engine has"
        assert sum(held) == -len(b"a0|") * 7
        for number in range(2):
            engine._handle(ended(f"a{number}"))
        assert (len(engine._held), engine._held.num_tokens, engine._num_sent) == (0, 0, 2)


async def test_a_list_ends_with_its_deadline_also_the_parts_that_were_not_sent() -> None:
    async with connected() as engine:
        with engine.hold_place():
            generation = engine.open_generation(list_of("a", 9), 0.01)
        async with generation:
            reasons = {o.finish_reason async for batch in generation.batches() for o in batch}
        assert reasons == {FinishReason.DEADLINE}
        assert (len(engine._held), engine._num_sent) == (2, 2)


async def test_a_draining_engine_gets_the_rest_of_a_list() -> None:
    async with connected() as engine:
        with engine.hold_place():
            engine.open_generation(list_of("a", 3), 100)
        engine.drain()
        engine._handle(finished("a0"))
        assert engine._num_sent == 3


async def test_a_request_that_goes_on_in_parts_keeps_its_place_until_the_last_one_has_ended() -> None:
    async with connected(max_num_queued_requests=3) as engine:
        parts = list_of("a", 3)
        with engine.hold_place(PLACE_IF_FREE):
            generation = engine.open_generation(parts[:1], 100, PLACE_IF_FREE, lambda _: next(following, None))
        following = iter(parts[1:])
        for number in range(3):
            with pytest.raises(NoPlace), engine.hold_place(PLACE_IF_FREE):
                pass
            engine._handle(finished(f"a{number}"))
        with engine.hold_place(PLACE_IF_FREE):
            pass
        async with generation:
            names = [o.request_id async for batch in generation.batches() for o in batch]
        assert names == ["a0", "a1", "a2"]


@pytest.mark.parametrize(
    ("warmup_seconds", "longest"), [(0.0, STEP_STUCK_SECONDS), (1.0, STEP_STUCK_SECONDS), (60.0, 300.0)]
)
def test_a_step_may_take_five_times_as_long_as_the_longest_of_the_warm_up(
    warmup_seconds: float, longest: float
) -> None:
    engine = EngineClient(EngineConfig(model="m"))
    engine._handle(Ready(make_facts(), warmup_seconds))
    engine._handle(Heartbeat(longest - 1))
    assert engine.is_alive
    engine._handle(Heartbeat(longest + 1))
    assert not engine.is_alive


def test_lost_graphs_are_a_warning_and_a_metric(caplog: pytest.LogCaptureFixture) -> None:
    engine, metrics = EngineClient(EngineConfig(model="m")), EngineMetrics("m")
    metrics.snapshot.facts = lambda: engine.facts
    engine._handle(Ready(make_facts(num_lost_graphs=2), 1.0))
    assert "event=cuda_graphs_lost number=2" in caplog.text
    samples = {sample.name: sample.value for family in metrics.snapshot.collect() for sample in family.samples}
    assert samples["conveyor_engine_lost_graphs"] == 2


async def test_a_silent_engine_is_not_alive_until_its_next_message() -> None:
    engine = EngineClient(EngineConfig(model="m"))
    workers, usage = WorkerPool(None, lambda: None), UsageReports()  # type: ignore[arg-type]
    model = ServedModel("m", None, SamplingDefaults())
    state = AppState(EngineConfig(model="m"), model, engine, EngineMetrics("m"), workers, None, None, usage, 0)  # type: ignore[arg-type]
    app = build_app(state)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:

        async def probe() -> tuple[int, int, str]:
            live, ready = await client.get("/livez"), await client.get("/readyz")
            return live.status_code, ready.status_code, ready.json()["status"]

        engine._handle(Ready(make_facts(), 0.0))
        assert await probe() == (200, 200, "ready")
        engine._last_heartbeat -= HEARTBEAT_LATE_SECONDS
        assert await probe() == (503, 503, "stuck")
        engine._handle(Heartbeat(0.0))
        assert await probe() == (200, 200, "ready")
