"""Tests that /readyz fails when the public port does not answer."""

import asyncio
import socket
from collections.abc import Callable

import pytest
from aiohttp import web

from conveyor_gateway.listening import self_check
from conveyor_gateway.listening.listener import Listener
from conveyor_gateway.watching.readiness import Readiness


class Checked:
    """The results of the checks of a port."""

    def __init__(self) -> None:
        self.readiness = Readiness([])
        self.answers: list[bool] = []

    def set_answers(self, answers: bool) -> None:
        self.readiness.answers_clients = answers
        self.answers.append(answers)

    async def wait(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(self_check, "TIMEOUT_SECONDS", 0.05)


async def test_a_port_that_takes_connections_and_answers_none_is_not_ready_after_some_checks() -> None:
    checked = Checked()
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:  # the kernel takes connections for it
        checking = asyncio.create_task(
            self_check.check_for_ever(silent.getsockname()[1], "127.0.0.1", checked.set_answers)
        )
        await checked.wait(lambda: not checked.readiness.answers_clients)
        checking.cancel()
    assert checked.answers == [True] * (self_check.MAX_FAILURES - 1) + [False]
    assert checked.readiness.problems() == ["the public port does not answer"]


async def test_a_port_that_answers_again_is_ready_after_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="ok")

    monkeypatch.setattr(self_check, "TIMEOUT_SECONDS", 20.0)
    checked = Checked()
    checked.readiness.answers_clients = False
    listener = Listener(answer, "", 0, 10)
    await listener.open()
    checking = asyncio.create_task(self_check.check_for_ever(listener.port, "", checked.set_answers))
    await checked.wait(lambda: bool(checked.answers))
    checking.cancel()
    await listener.close()
    assert checked.answers[0]
    assert checked.readiness.problems() == []


async def test_a_port_that_is_full_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=503)

    monkeypatch.setattr(self_check, "TIMEOUT_SECONDS", 20.0)
    checked = Checked()
    listener = Listener(refuse, "127.0.0.1", 0, 10)
    await listener.open()
    checking = asyncio.create_task(self_check.check_for_ever(listener.port, "127.0.0.1", checked.set_answers))
    await checked.wait(lambda: not checked.readiness.answers_clients)
    checking.cancel()
    await listener.close()
