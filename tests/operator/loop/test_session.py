"""Tests Kopf's connection when the API server refuses its credentials, or stops to serve a kind."""

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.operator.metrics_api.steps import until
from tests.operator.stage import Stage, wait_until

from conveyor_operator.kinds import AUTOSCALER, POD
from conveyor_operator.loop.session import KopfSession
from conveyor_operator.metrics import Metrics
from conveyor_operator.process import Operator, run_operator


def test_credentials_that_are_refused_for_a_moment_do_not_end_the_operator(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """An API server without its database refuses valid tokens."""
    with stage.operator(), caplog.at_level(logging.WARNING, "conveyor_operator.loop.session"):
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
        refused = stage.proxy.fail(lambda call: (call.verb, call.resource) == ("watch", POD.plural), 401, times=2)
        stage.proxy.sever()
        stage.proxy.severed = False
        wait_until("it was refused twice", lambda: refused.hits == 2)
        stage.space.delete("PodDisruptionBudget", "qwen-engine")
        wait_until("it is back", lambda: stage.space.get("PodDisruptionBudget", "qwen-engine"))
        stage.proxy.wait_quiet(2)
    assert "event=credentials_refused" in caplog.text


async def test_the_operator_is_ready_again_although_kopf_gave_up_the_request_that_found_no_kind(stage: Stage) -> None:
    settings, namespace = stage.settings, stage.space.namespace
    operator = Operator(settings, Mock(), Metrics())
    health = operator.health
    health.waiting_for = ""
    session = KopfSession(
        settings.kubeconfig, operator.resources, [namespace], operator.watches, operator._report_missing
    )
    async with contextlib.aclosing(session):
        login = await session.login()

        async def read(path: str) -> None:
            await login.aiohttp_session.request("get", f"{login.server}{path}")

        stage.proxy.fail(lambda call: call.resource == AUTOSCALER.plural, 404)
        waiting = asyncio.create_task(read(AUTOSCALER.path(namespace)))
        await until("the report", lambda: health.obstacle)
        waiting.cancel()
        await read(POD.path(namespace))
        assert health.obstacle == "the CRD horizontalpodautoscalers.autoscaling was deleted"
        await read(AUTOSCALER.path(namespace))
        assert not health.obstacle


async def test_the_operator_ends_although_each_turn_of_the_loop_ends_a_watch_while_kopf_stops(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kopf suppresses the cancellation of a watch that ends in the turn in which it is cancelled."""
    sessions = list[KopfSession]()

    class Session(KopfSession):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            sessions.append(self)

    monkeypatch.setattr("conveyor_operator.process.KopfSession", Session)
    namespaces = (stage.space.namespace, "empty", "another")
    stop = asyncio.Event()
    running = asyncio.create_task(run_operator(replace(stage.settings, watch_namespaces=namespaces), stop))
    await until("all watches", lambda: sessions and len(sessions[0]._open) == len(sessions[0]._collections))
    stop.set()
    for response in list(sessions[0]._open):
        response.close()
        await asyncio.sleep(0)
    await asyncio.wait_for(running, 30)
