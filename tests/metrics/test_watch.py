"""A list that stays current, against a real API server that also fails."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from conveyor_metrics.server import connect
from conveyor_metrics.watch import watch_objects
from e2e.cluster.api import Api
from e2e.cluster.certificates import write_kubeconfig
from e2e.cluster.control_plane import ControlPlane

Json = dict[str, Any]


class Seen:
    """The latest list of names, and a way to wait for one."""

    def __init__(self) -> None:
        self.names: list[str] | None = None
        self._changed = asyncio.Event()

    def set(self, objects: list[Json]) -> None:
        self.names = sorted(item["metadata"]["name"] for item in objects)
        self._changed.set()

    async def wait_for(self, *names: str) -> None:
        async with asyncio.timeout(30):
            while self.names != sorted(names):
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def watching() -> AsyncIterator[Callable[..., Any]]:
    """Starts a watch of the ConfigMaps labelled `watched`; ends it with the test."""
    stack = contextlib.AsyncExitStack()
    tasks = []

    async def begin(kubeconfig: Path, namespace: str) -> Seen:
        client, seen = await stack.enter_async_context(connect(str(kubeconfig))), Seen()
        path = f"/api/v1/namespaces/{namespace}/configmaps"
        tasks.append(asyncio.create_task(watch_objects(client, path, {"labelSelector": "watched"}, seen.set)))
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


async def test_what_happened_while_the_connection_was_gone_is_seen_afterwards(
    control_plane: ControlPlane, namespace: str, watching: Callable[..., Any], tmp_path: Path
) -> None:
    api = Api(control_plane.kubeconfig)
    async with CuttableProxy(control_plane.port) as proxy:
        seen = await watching(proxy.write_kubeconfig(control_plane, tmp_path), namespace)
        await seen.wait_for()
        await proxy.cut()
        create(api, namespace, "meanwhile", watched="")
        await seen.wait_for("meanwhile")
        await proxy.cut()
        api.delete(f"/api/v1/namespaces/{namespace}/configmaps/meanwhile")
        await seen.wait_for()


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
    async with asyncio.timeout(20):
        while "grant it with the chart's metrics roles" not in caplog.text:  # noqa: ASYNC110  a log has no event
            await asyncio.sleep(0.05)
    assert seen.names is None
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
    binding = {"metadata": {"name": user}, "roleRef": role, "subjects": [subject]}
    api.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings", binding)
    await seen.wait_for("first")


async def test_a_watch_that_is_too_old_lists_again(watching: Callable[..., Any], tmp_path: Path) -> None:
    """An API server that forgets: the list grows by one each time, and every watch ends with 410 Gone."""
    lists = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal lists
        if "watch" in request.query:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            return web.json_response({"type": "ERROR", "object": gone})
        lists += 1
        items = [{"metadata": {"name": f"item-{number}"}} for number in range(lists)]
        return web.json_response({"metadata": {"resourceVersion": str(lists)}, "items": items})

    app = web.Application()
    app.router.add_get("/api/v1/namespaces/any/configmaps", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        f"""{{"current-context": "a", "contexts": [{{"name": "a", "context": {{"cluster": "a", "user": "a"}}}}],
        "clusters": [{{"name": "a", "cluster": {{"server": "http://127.0.0.1:{site.port}"}}}}],
        "users": [{{"name": "a", "user": {{}}}}]}}"""
    )
    seen = await watching(kubeconfig, "any")
    await seen.wait_for("item-0", "item-1")
    await runner.cleanup()


class CuttableProxy:
    """Passes bytes to the API server; `cut` ends every connection."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "CuttableProxy":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    def write_kubeconfig(self, plane: ControlPlane, folder: Path) -> Path:
        pair = plane.authority.issue("through-proxy", "admin", "system:masters")
        server = f"https://127.0.0.1:{self.port}"
        return write_kubeconfig(folder / "kubeconfig", "proxy", server, plane.authority.certificate, pair)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers += [writer, there_writer]
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
