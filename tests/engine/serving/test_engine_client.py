"""The engine as the HTTP side sees it: a process of few words or its messages alone, without a server."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from tests.engine.builders import make_facts, make_request

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import EngineDead, Overloaded, Unavailable
from conveyor_engine.serving.engine_client import HEARTBEAT_LATE_SECONDS, STEP_STUCK_SECONDS, EngineClient, State
from conveyor_engine.serving.generation import Generation
from conveyor_engine.serving.http.app import build_app
from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.wire.messages import Add, Drain, Heartbeat, Ready, Step, encode_frame
from conveyor_engine.wire.request import EngineRequest, EngineStats


@asynccontextmanager
async def running(on_step: Callable[[Step], None] = lambda _: None, device: str = "cpu") -> AsyncIterator[EngineClient]:
    """A started engine; it is not ready yet."""
    config = EngineConfig(model="m", device=device)  # type: ignore[arg-type]
    engine = EngineClient(config, on_step, "tests.engine.serving.few_words")
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def open_generation(engine: EngineClient, request: EngineRequest) -> Generation:
    return engine.open_generation([request.request_id], encode_frame(Add.of([request])), 100)


async def test_an_engine_that_is_not_understood_is_dead_and_its_requests_hear_it() -> None:
    def fail(_: Step) -> None:
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


async def test_what_a_dying_engine_says_is_heard_although_nobody_listens_to_it() -> None:
    async with running(device="cuda") as engine:
        process = engine._process._process
        assert process is not None
        with suppress(ChildProcessError):  # asyncio was faster
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  the loop must not hear
        engine._process.send(Drain())
        await engine.dead.wait()
        assert engine.death is not None
        assert engine.death.reason == "NoDevice"


async def test_a_request_that_leaves_keeps_its_place_until_the_engine_has_taken_it() -> None:
    engine = EngineClient(EngineConfig(model="m", max_num_queued_requests=1))
    engine._take(Ready(make_facts(max_num_seqs=1), 0.0))
    ours, theirs = socket.socketpair()
    with theirs:
        await engine._process.connect(ours)
        for name in ("a", "b"):
            with engine.hold_place():
                generation = open_generation(engine, make_request(name))
            async with generation:
                pass
        assert engine.num_open == 0
        with pytest.raises(Overloaded, match="2 requests are arriving"), engine.hold_place():
            pass
        engine._take(Step([], EngineStats(), 1))
        with engine.hold_place():
            pass
        engine._process.close()


@pytest.mark.parametrize(
    ("warmup_seconds", "longest"), [(0.0, STEP_STUCK_SECONDS), (1.0, STEP_STUCK_SECONDS), (60.0, 300.0)]
)
def test_a_step_may_take_five_times_as_long_as_the_longest_of_the_warm_up(
    warmup_seconds: float, longest: float
) -> None:
    engine = EngineClient(EngineConfig(model="m"))
    engine._take(Ready(make_facts(), warmup_seconds))
    engine._take(Heartbeat(longest - 1))
    assert engine.is_alive
    engine._take(Heartbeat(longest + 1))
    assert not engine.is_alive


async def test_a_silent_engine_is_not_alive_until_it_is_heard_again() -> None:
    engine = EngineClient(EngineConfig(model="m"))
    state = AppState(EngineConfig(model="m"), "m", engine, None, EngineMetrics("m"), None, None, 0)  # type: ignore[arg-type]
    app = build_app(state)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:

        async def probe() -> tuple[int, int, str]:
            live, ready = await client.get("/livez"), await client.get("/readyz")
            return live.status_code, ready.status_code, ready.json()["status"]

        engine._take(Ready(make_facts(), 0.0))
        assert await probe() == (200, 200, "ready")
        engine._last_heartbeat -= HEARTBEAT_LATE_SECONDS
        assert await probe() == (503, 503, "stuck")
        engine._take(Heartbeat(0.0))
        assert await probe() == (200, 200, "ready")
