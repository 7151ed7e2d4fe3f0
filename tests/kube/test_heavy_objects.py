"""Tests that watches survive objects that are as deep and as wide as a real API server accepts.

The objects are of a resource of the tests, which has no schema. Conveyor's has one, but other kinds may have none.
"""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient, Configuration
from tests.kube.api_proxy import ApiProxy
from tests.kube.kept import end, until

from conveyor_kube.watch import Collection, WatchState, watch_collection
from conveyor_kube.watched_list import WatchedList
from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane

GROUP = "tests.conveyor.dev"
Json = dict[str, Any]


@pytest.fixture(scope="session")
def heavies(control_plane: ControlPlane) -> Api:
    """An API server with a resource whose objects may have any content."""
    api = Api(control_plane.kubeconfig)
    names = {"plural": "heavies", "singular": "heavy", "kind": "Heavy", "listKind": "HeavyList"}
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    spec = {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]}
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/heavies.{GROUP}"
    body = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    api.apply(path, {**body, "metadata": {"name": f"heavies.{GROUP}"}, "spec": spec})
    wait_until("the CRD", lambda: api.reachable(f"/apis/{GROUP}/v1/heavies"))
    return api


@pytest.fixture
def create(heavies: Api, namespace: str) -> Iterator[Callable[[str, str], None]]:
    """A function `create(name, spec)`.

    The spec is text, as JSON encoders cannot write the deep ones. Deletes the objects.
    """
    path = f"/apis/{GROUP}/v1/namespaces/{namespace}/heavies"

    def create(name: str, spec: str) -> None:
        head = {"apiVersion": f"{GROUP}/v1", "kind": "Heavy", "metadata": {"name": name}}
        heavies.send("POST", path, (json.dumps(head)[:-1] + f', "spec": {spec}}}').encode())

    yield create
    heavies.send("DELETE", path)


class Following:
    """The events that a watch of the namespace's objects has passed on."""

    def __init__(self, namespace: str) -> None:
        self.collection = Collection(GROUP, "v1", "heavies", namespace)
        self.state = WatchState("heavies")
        self.names: set[str] = set()

    def take(self, bodies: list[Json]) -> None:
        self.names = {body["metadata"]["name"] for body in bodies}


@pytest.fixture
async def follow(kubeconfig: Path, namespace: str) -> AsyncIterator[Callable[[], Following]]:
    tasks = []
    async with ApiProxy(kubeconfig).running() as url, ApiClient(Configuration(host=url)) as client:

        def begin() -> Following:
            following = Following(namespace)
            watch = watch_collection(client, following.collection, WatchedList(following.take), following.state)
            tasks.append(asyncio.create_task(watch))
            return following

        yield begin
        await end(tasks)


def deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.slow
async def test_deep_objects_are_listed_and_followed_like_all_others(
    create: Callable[[str, str], None],
    follow: Callable[[], Following],
    heavies: Api,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await asyncio.to_thread(create, "listed", deep(1200))
    await asyncio.to_thread(create, "plain", "{}")
    following = follow()
    await until(lambda: following.names == {"listed", "plain"})
    await asyncio.to_thread(create, "deepest", deep(9_000))
    await asyncio.to_thread(create, "later", "{}")
    await until(lambda: following.names == {"listed", "plain", "deepest", "later"})
    for name in ("deepest", "listed"):
        await asyncio.to_thread(heavies.send, "DELETE", f"{following.collection.path}/{name}")
    await until(lambda: following.names == {"plain", "later"})
    assert "watch_failed" not in caplog.text, "they are followed, not listed again"


@pytest.mark.slow
async def test_wide_objects_cost_the_memory_of_a_page(
    create: Callable[[str, str], None], follow: Callable[[], Following], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conveyor_kube.watch._PAGE_ITEMS", 2)
    wide = f'{{"a":[{",".join(["{}"] * 400_000)}]}}'  # 1.2 MB, 26 MB as Python objects
    for number in range(6):
        await asyncio.to_thread(create, f"wide-{number}", wide)
    tracemalloc.start()
    try:
        following = follow()
        await until(lambda: len(following.names) == 6)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 * len(wide)  # pages of two, here and in the proxy; as Python objects it would be 130 times
