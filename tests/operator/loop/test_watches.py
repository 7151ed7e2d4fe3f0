"""Tests watches with deletions that were not reported, and with hostile objects of tenants."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import pytest
from tests.operator.api_proxy import Call
from tests.operator.builders import make_services
from tests.operator.deep_objects import DEEP, create_deep
from tests.operator.stage import Stage, make_service, wait_until

from conveyor_api import names
from conveyor_operator.inferenceservice.kinds import CHILDREN, GRANDCHILDREN, INFERENCE_SERVICE, OPTIONAL
from conveyor_operator.kinds import AUTOSCALER, ENDPOINT_SLICE, POD, ObjectKind
from conveyor_operator.loop.store import Store
from conveyor_operator.loop.watches import Watches
from conveyor_operator.metrics import Metrics
from e2e.cluster.control_plane import ControlPlane

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 5}
KINDS = [kind for kind in (INFERENCE_SERVICE, *CHILDREN, *GRANDCHILDREN) if kind not in OPTIONAL]
NAMED = {"name": "a", "namespace": "b", "uid": "1"}
BODIES = {
    "ADDED": make_service() | {"metadata": {**NAMED, "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 1}},
    "BOOKMARK": {"metadata": {"resourceVersion": "1"}},
}


@contextmanager
def watches_expired(stage: Stage, *kinds: ObjectKind) -> Iterator[None]:
    """Let no watch report changes of these kinds in the body. No watch can be resumed, so Kopf lists again."""
    stage.proxy.sever()
    yield
    for kind in kinds:
        stage.proxy.fail(lambda call, kind=kind: (call.verb, call.resource) == ("watch", kind.plural), 410)
    stage.proxy.severed = False
    wait_until("all expired", lambda: all(fault.hits for fault in stage.proxy.faults))


def test_a_child_that_was_deleted_while_watches_expired_comes_back(stage: Stage) -> None:
    """It is the only child of its kind, and Kopf does not report an empty list."""
    with stage.operator():
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        stage.proxy.wait_quiet()
        with watches_expired(stage, *KINDS):
            stage.space.delete("HorizontalPodAutoscaler", "qwen-engine")
        wait_until("the HPA again", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))


def test_a_child_comes_back_whose_watch_alone_expired(stage: Stage) -> None:
    """No list of another kind leads to a reconcile."""
    with stage.operator():
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        stage.proxy.wait_quiet()
        with watches_expired(stage, AUTOSCALER):
            stage.space.delete("HorizontalPodAutoscaler", "qwen-engine")
        wait_until("the HPA again", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))


@pytest.mark.slow
def test_a_service_made_again_while_watches_expired_keeps_its_children(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
        with watches_expired(stage, *KINDS):
            stage.space.delete("InferenceService", "qwen")
            wait_until("nothing is left", lambda: not stage.space.children("qwen"))
            uid = stage.space.make_service()["metadata"]["uid"]
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet(2)
        found = [stage.space.need(kind, name)["metadata"] for kind, name in stage.space.children("qwen")]
        assert {metadata["ownerReferences"][0]["uid"] for metadata in found} == {uid}
        stage.space.edit("qwen", drain={"timeout": "9s"})
        stage.proxy.wait_quiet(2)
        after = [stage.space.need(kind, name)["metadata"]["uid"] for kind, name in stage.space.children("qwen")]
        assert {metadata["uid"] for metadata in found} <= set(after)


def test_a_watch_that_breaks_off_before_it_is_complete_begins_anew(stage: Stage) -> None:
    num_watches = 0

    def second_watch(call: Call) -> bool:
        """Match the second watch.

        The first one gets an error that its version is gone, so the second one begins with all objects.
        """
        nonlocal num_watches
        num_watches += (call.verb, call.resource) == ("watch", AUTOSCALER.plural)
        return num_watches == 2 and call.verb == "watch"

    with stage.operator():
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        stage.proxy.wait_quiet()
        fault = stage.proxy.fail(second_watch, 0)
        with watches_expired(stage, AUTOSCALER):
            stage.space.delete("HorizontalPodAutoscaler", "qwen-engine")
        wait_until("the HPA again", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        assert fault.hits == 1


ADDED, BOOKMARK = "ADDED", "BOOKMARK"


class Reported:
    """What Kopf gets of watches of InferenceServices."""

    def __init__(self) -> None:
        self.watches = Watches([make_services()], Store(), Metrics(), Mock())

    async def read(self, count: int, *types: str, from_the_start: bool = True, end: bool = False) -> list[str]:
        """Return the types of the first events that Kopf gets of a stream of these events."""
        content = aiohttp.StreamReader(Mock(), 2**16)
        for each in types:
            content.feed_data(json.dumps({"type": each, "object": BODIES[each]}).encode() + b"\n")
        if end:
            content.feed_eof()
        lines = self.watches.read(INFERENCE_SERVICE, None, content, from_the_start)
        async with asyncio.timeout(120), contextlib.aclosing(lines):
            return [json.loads(await anext(lines))["type"] for _ in range(count)]


async def test_no_watch_is_resumed() -> None:
    """Kopf cancels a watch that is silent for long, and would continue after the last object that it saw."""
    reported = Reported()
    assert await reported.read(1, ADDED) == [ADDED]
    assert await reported.read(1, ADDED, from_the_start=False) == ["ERROR"]
    assert await reported.read(2, BOOKMARK) == ["DELETED", BOOKMARK]
    assert await reported.read(1, BOOKMARK, from_the_start=False) == ["ERROR"]


@pytest.mark.parametrize("types", [(), (ADDED,), (ADDED, BOOKMARK)])
async def test_a_watch_that_ends_begins_with_a_list_again(types: tuple[str, ...]) -> None:
    assert await Reported().read(len(types) + 1, *types, end=True) == [*types, "ERROR"]


async def test_after_its_time_a_watch_ends_at_the_next_line_and_begins_with_a_list_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await Reported().read(3, ADDED, BOOKMARK, BOOKMARK) == [ADDED, BOOKMARK, BOOKMARK]
    monkeypatch.setattr("conveyor_operator.loop.watches._WATCH_SECONDS", (0, 0))
    assert await Reported().read(3, ADDED, BOOKMARK, BOOKMARK) == [ADDED, BOOKMARK, "ERROR"]


async def test_a_silent_watch_that_kopf_cancels_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    content = aiohttp.StreamReader(Mock(), 2**16)
    lines = Watches([make_services()], Store(), Metrics(), Mock()).read(INFERENCE_SERVICE, None, content, True)
    task = asyncio.ensure_future(anext(lines))
    await asyncio.sleep(0)
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now + 70)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "event=watch_silent kind=InferenceService seconds=70" in caplog.text


async def test_a_child_of_a_beginning_marks_its_service_and_is_not_passed_to_kopf() -> None:
    marked: list[tuple[str, bool]] = []
    mark = lambda key, urgent=True: marked.append((str(key), urgent))  # noqa: E731
    watches = Watches([make_services()], Store(), Metrics(), mark)
    pod = {"metadata": {**NAMED, "labels": {names.INFERENCE_SERVICE_LABEL: "c"}}}
    events = [{"type": "ADDED", "object": pod}, {"type": "BOOKMARK", "object": {"metadata": {}}}]
    content = aiohttp.StreamReader(Mock(), 2**16)
    content.feed_data(b"".join(json.dumps(event).encode() + b"\n" for event in [*events, *events[:1]]))
    content.feed_eof()
    lines = [json.loads(line)["type"] async for line in watches.read(POD, None, content, True)]
    assert (lines, marked) == (["BOOKMARK", "ADDED", "ERROR"], [("b/c", False)])


async def test_a_list_marks_only_services_whose_children_have_changed() -> None:
    marked: list[str] = []
    watches = Watches([make_services()], Store(), Metrics(), lambda key, urgent=True: marked.append(str(key)))

    async def list_slices(*ready: bool) -> None:
        content = aiohttp.StreamReader(Mock(), 2**16)
        for number, each in enumerate(ready):
            metadata = {**NAMED, "uid": str(number), "labels": {names.INFERENCE_SERVICE_LABEL: f"service-{number}"}}
            event = {
                "metadata": metadata,
                "endpoints": [{"conditions": {"ready": each}}],
                "ports": [{"name": "http", "port": 8000}],
            }
            content.feed_data(json.dumps({"type": "ADDED", "object": event}).encode() + b"\n")
        content.feed_eof()
        assert [line async for line in watches.read(ENDPOINT_SLICE, None, content, True)]

    await list_slices(True, True)
    assert marked == ["b/service-0", "b/service-1"]
    await list_slices(True, False)
    assert marked[2:] == ["b/service-1"]


@pytest.mark.slow
def test_an_operator_lists_nothing_that_tenants_write(stage: Stage) -> None:
    """Each watch begins with all objects, one by one, so that no response contains all of them at once."""
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        with watches_expired(stage, POD):
            pass
        stage.proxy.wait_quiet(2)
    listed = {(call.resource, call.namespace) for call in stage.proxy.calls if call.verb == "list"}
    system = stage.settings.system_namespace
    assert listed == {
        ("endpointslices", system),  # who the gateways are
        ("servednames", system),
        ("servednames", stage.space.namespace),  # which tenants may not write
    }


def test_objects_that_cannot_be_read_harm_no_other_service(
    stage: Stage, control_plane: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "conveyor_operator.loop.watches"):
        with stage.operator():
            stage.space.make_service("before")
            stage.space.wait_children("before")
            create_deep(stage.space.namespace, control_plane.kubeconfig, tmp_path)
            stage.space.make_service("beside")
            stage.space.wait_children("beside")
        with stage.operator():
            stage.space.make_service("after-a-restart")
            stage.space.wait_children("after-a-restart")
    for kind in DEEP:
        calls = [
            r.getMessage() for r in caplog.records if f"kind={kind} key={stage.space.namespace}/deep" in r.getMessage()
        ]
        assert len(calls) == 2, "once in each life"
