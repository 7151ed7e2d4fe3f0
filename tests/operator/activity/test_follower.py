"""Tests the sum of all gateways' reports about services that may scale to zero, and invalid reports."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from aiohttp import web
from tests.gateway.cluster import publish_gateway
from tests.gateway.engine_servers import answering, running_engine
from tests.operator.stage import Space, wait_until

from conveyor_kube.watch import connect
from conveyor_operator.activity import follower as follower_module
from conveyor_operator.activity.answer import Activity
from conveyor_operator.activity.follower import ActivityFollower, sum_activity
from conveyor_operator.metrics import Metrics
from conveyor_protocol.pages import Activity as Page
from e2e.cluster.control_plane import ControlPlane


def page(waiting: str = "", idle: str = "") -> Page:
    return Page(services=9, waiting=frozenset(waiting.split()), idle=frozenset(idle.split()))


def test_one_gateway_that_holds_requests_is_enough() -> None:
    assert sum_activity([page(), page(waiting="a/b")]) == {"a/b": Activity.WAITING}
    assert sum_activity([None, page(waiting="a/b")]) == {"a/b": Activity.WAITING}


def test_a_service_is_idle_when_all_gateways_say_so() -> None:
    assert sum_activity([page(idle="a/b a/c"), page(idle="a/b")]) == {"a/b": Activity.IDLE}
    assert sum_activity([page(idle="a/b"), page()]) == {}


def test_a_gateway_that_says_nothing_may_have_requests() -> None:
    assert sum_activity([page(idle="a/b"), None]) == {}


def test_requests_at_one_gateway_outweigh_the_idleness_at_others() -> None:
    """For a moment, each gateway may have its own view of the engines."""
    assert sum_activity([page(idle="a/b", waiting="a/b"), page(idle="a/b")]) == {"a/b": Activity.WAITING}


def test_without_gateways_nothing_is_known() -> None:
    assert sum_activity([]) == {}


NAMES = {"services": 1, "waiting": ["default/qwen"], "idle": []}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answering(web.json_response, data={**NAMES, "waiting": ["x"]}), id="no name"),
        pytest.param(
            answering(web.json_response, data={**NAMES, "idle": ["a/b/c"]}), id="longer name", marks=pytest.mark.slow
        ),
        pytest.param(answering(web.json_response, data={}), id="nothing", marks=pytest.mark.slow),
        pytest.param(answering(web.Response, text="[" * 200_000), id="nested"),
        pytest.param(
            answering(web.Response, text="[" * 200_000, status=503), id="nested refusal", marks=pytest.mark.slow
        ),
        pytest.param(answering(web.Response, text="x", status=404), id="no such page"),
    ],
)
async def test_a_page_that_is_none_is_left_out_and_ends_nothing(
    control_plane: ControlPlane, space: Space, answer: Callable[..., web.StreamResponse]
) -> None:
    """The address may belong to another pod by now, and an older gateway has no such page."""
    marked: list[str] = []
    metrics = Metrics()
    async with (
        connect(str(control_plane.kubeconfig)) as client,
        running_engine(answer) as bad,  # type: ignore[arg-type]
        running_engine(answering(web.json_response, data=NAMES)) as good,
    ):
        follower = ActivityFollower(client, space.namespace, metrics, marked.append)
        for name, server in (("bad", bad), ("good", good)):
            await asyncio.to_thread(publish_gateway, space.api, space.namespace, name, server.port)
        following = asyncio.create_task(follower.run())
        await asyncio.to_thread(wait_until, "the good one's word", lambda: marked)
        await asyncio.to_thread(wait_until, "a second look", lambda: len(bad.requests) > 1)
        assert not following.done()
        assert (marked, follower["default/qwen"]) == (["default/qwen"], Activity.WAITING)
        assert metrics.registry.get_sample_value("conveyor_operator_unreadable_gateways") == 1
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


@pytest.mark.parametrize(("longest_silence_seconds", "activity"), [(3600, Activity.IDLE), (-1, Activity.STEADY)])
async def test_a_list_of_gateways_that_may_be_old_lets_no_engine_go(
    control_plane: ControlPlane,
    space: Space,
    monkeypatch: pytest.MonkeyPatch,
    longest_silence_seconds: float,
    activity: Activity,
) -> None:
    """There may be another gateway, which holds requests."""
    monkeypatch.setattr(follower_module, "MAX_SILENCE_SECONDS", longest_silence_seconds)
    page = {"services": 2, "waiting": ["default/other"], "idle": ["default/qwen"]}
    async with (
        connect(str(control_plane.kubeconfig)) as client,
        running_engine(answering(web.json_response, data=page)) as gateway,
    ):
        follower = ActivityFollower(client, space.namespace, Metrics(), lambda service: None)
        await asyncio.to_thread(publish_gateway, space.api, space.namespace, "one", gateway.port)
        following = asyncio.create_task(follower.run())
        await asyncio.to_thread(wait_until, "its word", lambda: follower["default/other"] is Activity.WAITING)
        assert follower["default/qwen"] is activity
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
