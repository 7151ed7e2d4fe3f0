"""Tests a list that follows a real API server. tests/kube/test_watch.py has the tests with failures."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from conveyor_kube.watch import Collection, WatchState, connect, watch_collection
from conveyor_kube.watched_list import WatchedList
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane

Json = dict[str, Any]


class Seen:
    """The latest list of names. Tests can wait for an expected list."""

    def __init__(self) -> None:
        self.names: list[str] | None = None
        self._changed = asyncio.Event()

    def set(self, objects: list[Json]) -> None:
        self.names = sorted(item["metadata"]["name"] for item in objects)
        self._changed.set()

    async def wait_for(self, *names: str) -> None:
        async with asyncio.timeout(120):
            while self.names != sorted(names):
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def watching() -> AsyncIterator[Callable[..., Any]]:
    """Starts a watch of the ConfigMaps labelled `watched`, and ends it after the test."""
    stack = contextlib.AsyncExitStack()
    tasks = []

    async def begin(kubeconfig: Path, namespace: str) -> Seen:
        client, seen = await stack.enter_async_context(connect(str(kubeconfig))), Seen()
        maps = Collection("", "v1", "configmaps", namespace, "watched")
        watch = watch_collection(client, maps, WatchedList(seen.set), WatchState(maps.name))
        tasks.append(asyncio.create_task(watch))
        return seen

    async with stack:
        yield begin
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def create(api: Api, namespace: str, name: str, **labels: str) -> None:
    body = {"metadata": {"name": name, "labels": labels}}
    api.create(f"/api/v1/namespaces/{namespace}/configmaps", body)


async def test_the_list_follows_what_is_there(
    control_plane: ControlPlane, namespace: str, watching: Callable[..., Any]
) -> None:
    api = Api(control_plane.kubeconfig)
    create(api, namespace, "first", watched="")
    seen = await watching(control_plane.kubeconfig, namespace)
    await seen.wait_for("first")
    create(api, namespace, "unlabelled")
    create(api, namespace, "second", watched="")
    await seen.wait_for("first", "second")
    api.delete(f"/api/v1/namespaces/{namespace}/configmaps/first")
    await seen.wait_for("second")


async def test_a_refusal_is_logged_with_what_to_do_and_tried_again(
    control_plane: ControlPlane,
    namespace: str,
    watching: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = Api(control_plane.kubeconfig)
    user = f"reader-of-{namespace}"
    create(api, namespace, "first", watched="")
    seen = await watching(control_plane.issue_kubeconfig(user, user), namespace)
    async with asyncio.timeout(120):
        while "grant it with the chart's roles" not in caplog.text:  # noqa: ASYNC110  a log has no event
            await asyncio.sleep(0.05)
    assert seen.names is None
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
    binding = {"metadata": {"name": user}, "roleRef": role, "subjects": [subject]}
    api.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings", binding)
    await seen.wait_for("first")
