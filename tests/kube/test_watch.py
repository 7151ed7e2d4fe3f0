"""Tests a watch of a real API server through a proxy that loses events, ends watches and refuses requests."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml
from kubernetes.aio.client import ApiClient, Configuration
from tests.gateway.cluster import Cluster, make_service
from tests.kube.api_proxy import ApiProxy
from tests.kube.kept import Kept, end, until

from conveyor_api.names import PLURAL
from conveyor_kube.resources import service_collection, slice_collection
from conveyor_kube.watch import WatchState, connect, watch_collection


class Followed:
    """The objects that watches of one namespace through `proxy` keep."""

    def __init__(self, proxy: ApiProxy, cluster: Cluster) -> None:
        self.proxy = proxy
        self.cluster = cluster
        self.kept = Kept(), Kept()
        self.collections = service_collection(cluster.namespace), slice_collection(cluster.namespace)
        self.states = tuple(WatchState(collection.name) for collection in self.collections)

    def knows(self, *names: str) -> bool:
        return self.kept[0].objects.keys() == set(names)

    def engines(self) -> dict[str, bool]:
        """Return whether each slice's endpoint is ready."""
        return {name: body["endpoints"][0]["conditions"]["ready"] for name, body in self.kept[1].objects.items()}


@pytest.fixture
async def followed(cluster: Cluster, kubeconfig: Path) -> AsyncIterator[Followed]:
    followed = Followed(ApiProxy(kubeconfig), cluster)
    async with followed.proxy.running() as url, ApiClient(Configuration(host=url)) as client:
        watched = zip(followed.collections, followed.kept, followed.states, strict=True)
        tasks = [asyncio.create_task(watch_collection(client, *each)) for each in watched]
        await until(lambda: followed.proxy.watches == 2)
        yield followed
        await end(tasks)


async def test_what_is_created_changed_and_deleted_is_followed(followed: Followed) -> None:
    cluster = followed.cluster
    await asyncio.to_thread(cluster.apply_service, "qwen")
    await asyncio.to_thread(cluster.apply_engine, "qwen", "192.0.2.7", 8000)
    await until(lambda: followed.knows("qwen") and followed.engines() == {"qwen-8000": True})
    await asyncio.to_thread(cluster.apply_engine, "qwen", "192.0.2.7", 8000, ready=False)
    await until(lambda: followed.engines() == {"qwen-8000": False})
    await asyncio.to_thread(cluster.apply_engine, "qwen", "192.0.2.7", 8000)
    await until(lambda: followed.engines() == {"qwen-8000": True})
    await asyncio.to_thread(cluster.delete_engine, "qwen", 8000)
    await asyncio.to_thread(cluster.delete_service, "qwen")
    await until(lambda: followed.knows() and followed.engines() == {})
    assert len(followed.proxy.lists) == 2  # all of it came as events


@pytest.mark.parametrize(("code", "in_order"), [(None, False), (410, False), (None, True)])
async def test_a_watch_that_ends_is_followed_by_a_list_that_repairs_what_was_lost(
    followed: Followed, code: int | None, in_order: bool
) -> None:
    """A watch that ends at its time is no exception: its version may lie ahead, because etcd was restored."""
    cluster = followed.cluster
    followed.proxy.ends_in_order = in_order
    await asyncio.to_thread(cluster.apply_service, "gone")
    await asyncio.to_thread(cluster.apply_engine, "gone", "192.0.2.7", 8000)
    await until(lambda: followed.knows("gone") and followed.engines() == {"gone-8000": True})
    followed.proxy.loses_events = True
    await asyncio.to_thread(cluster.delete_service, "gone")
    await asyncio.to_thread(cluster.delete_engine, "gone", 8000)
    await asyncio.to_thread(cluster.apply_service, "new")
    await until(lambda: b'"name":"new"' in followed.proxy.lost)
    assert followed.knows("gone")  # the door has lost these events, or this test proves nothing
    followed.proxy.loses_events = False
    followed.proxy.end_watches(code)
    await until(lambda: followed.knows("new") and followed.engines() == {})
    assert len(followed.proxy.lists) == 4


async def test_a_text_beyond_any_object_is_not_taken_into_memory(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("conveyor_kube.watch._MAX_TEXT_BYTES", 100_000)
    body = make_service("large", followed.cluster.namespace)
    body["metadata"]["annotations"] = {"note": "x" * 200_000}
    await asyncio.to_thread(followed.cluster.api.apply, f"{followed.collections[0].path}/large", body)
    await until(lambda: caplog.text.count("a text of more than 100000 bytes") >= 2)  # as an event, then in the list
    monkeypatch.undo()
    await until(lambda: followed.knows("large"))


async def test_while_the_api_server_is_away_what_was_known_stays(followed: Followed) -> None:
    await asyncio.to_thread(followed.cluster.apply_service, "qwen")
    await until(lambda: followed.knows("qwen"))
    followed.proxy.is_shut = True
    followed.proxy.end_watches()
    received = followed.states[0].received_at
    await until(lambda: followed.proxy.refused >= 4)  # both watches have tried twice
    assert followed.knows("qwen")
    assert followed.states[0].received_at == received
    assert followed.states[0].synced
    followed.proxy.is_shut = False
    await asyncio.to_thread(followed.cluster.apply_service, "new")
    await until(lambda: followed.knows("qwen", "new"))
    assert followed.states[0].received_at > received


async def test_a_watch_that_ends_once_is_routine_and_one_that_fails_again_is_a_warning(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    followed.proxy.end_watches(410)
    await until(lambda: len(find_failures(caplog)) == 2 and followed.proxy.watches == 2)
    assert {record.levelname for record in find_failures(caplog)} == {"INFO"}
    followed.proxy.is_shut = True
    followed.proxy.end_watches()
    await until(lambda: "WARNING" in {record.levelname for record in find_failures(caplog)})


def find_failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "event=watch_failed" in record.message]


async def test_a_watch_that_falls_silent_is_given_up_and_listed_again(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conveyor_kube.watch._WATCH_TIMEOUT", aiohttp.ClientTimeout(total=None, sock_read=0.5))
    followed.proxy.end_watches()  # those that begin now are given up after half a second of silence
    await until(lambda: followed.proxy.watches == 4)
    followed.proxy.loses_events = True
    await asyncio.to_thread(followed.cluster.apply_service, "new")
    await until(lambda: followed.knows("new"))


@pytest.mark.parametrize(
    ("sizes", "limits"),
    [
        ({}, [2, 4, 8]),
        ({"_SMALL_PAGE_BYTES": 0}, [2, 2, 2, 2]),
        ({"_LARGE_PAGE_BYTES": 100}, [2, 4, 2, 2, 2]),
        ({"_MAX_PAGE_ITEMS": 3}, [2, 3, 3]),
    ],
    ids=["small", "large", "too-large", "many"],
)
async def test_a_long_list_is_read_by_pages_that_grow_while_they_are_small(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], limits: list[int]
) -> None:
    for name, value in {"_PAGE_ITEMS": 2, **sizes}.items():
        monkeypatch.setattr(f"conveyor_kube.watch.{name}", value)
    names = [f"service-{number}" for number in range(7)]
    for name in names:
        await asyncio.to_thread(followed.cluster.apply_service, name)
    await until(lambda: followed.knows(*names))
    before = len(followed.proxy.lists)
    followed.kept[0].objects.clear()
    followed.proxy.end_watches()
    await until(lambda: followed.knows(*names))
    pages = [path for path in followed.proxy.lists[before:] if PLURAL in path]
    assert [int(page.split("limit=")[1].split("&")[0]) for page in pages] == limits
    assert ["continue=" in page for page in pages] == [False] + [True] * (len(limits) - 1)


async def test_an_object_larger_than_any_buffer_arrives(followed: Followed) -> None:
    """A line of a watch may arrive in any number of pieces."""
    body = make_service("large", followed.cluster.namespace)
    body["metadata"]["annotations"] = {"note": "x" * 200_000}
    path = f"{followed.collections[0].path}/large"
    await asyncio.to_thread(followed.cluster.api.apply, path, body)
    await until(lambda: followed.knows("large"))
    assert len(followed.proxy.lists) == 2


def write_kubeconfig(original: Path, url: str, path: Path) -> Path:
    """Write the kubeconfig with another address of the API server."""
    config = yaml.safe_load(original.read_text())
    config["clusters"][0]["cluster"] = {"server": url}
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.slow
async def test_any_number_of_watches_is_open_at_once(kubeconfig: Path, cluster: Cluster, tmp_path: Path) -> None:
    """The client's default limit is 100 connections. Objects that are listed but not watched would miss all changes."""
    collection = service_collection(cluster.namespace)
    kept = [Kept() for _ in range(102)]
    states = [WatchState(collection.name) for _ in kept]
    async with (
        ApiProxy(kubeconfig).running() as url,
        connect(str(write_kubeconfig(kubeconfig, url, tmp_path / "kubeconfig"))) as client,
    ):
        tasks = [
            asyncio.create_task(watch_collection(client, collection, sink, state))
            for sink, state in zip(kept, states, strict=True)
        ]
        await until(lambda: all(state.synced for state in states))
        await asyncio.to_thread(cluster.apply_service, "qwen")
        await until(lambda: all(sink.objects for sink in kept))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_only_slices_of_inference_services_are_requested(followed: Followed) -> None:
    lists = [path for path in followed.proxy.lists if "endpointslices" in path]
    assert all("labelSelector=conveyor.dev" in path for path in lists)
    assert lists
