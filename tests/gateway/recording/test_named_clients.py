"""Tests which clients have metric series of their own."""

import asyncio
from collections import Counter

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.engine_servers import answering
from tests.gateway.local import local_gateway, make_key

from conveyor_gateway.recording.named_clients import MAX_NAMED, NamedClient, NamedClients


class Run:
    """Named clients, and how many requests of each were counted."""

    def __init__(self) -> None:
        self.requests = Counter[NamedClient]()
        self.clients = NamedClients(self.requests.__getitem__, self.requests.__delitem__)

    def count(self, client: str, service: str = "team/chat") -> bool:
        named = NamedClient(service, client, "")
        if named not in self.requests and not self.clients.admit(named):
            return False
        self.requests[named] += 1
        return True

    def list_namespaces(self) -> Counter[str]:
        return Counter(named.client.partition("/")[0] for named in self.requests)


def test_a_namespace_with_many_keys_makes_room_for_others_and_never_for_itself() -> None:
    run = Run()
    for number in range(MAX_NAMED + 100):
        assert run.count(f"many/{number}") is (number < MAX_NAMED)
    run.count("many/0")
    for number in range(MAX_NAMED):
        run.count(f"few/{number}")
    assert run.list_namespaces() == {"many": MAX_NAMED // 2, "few": MAX_NAMED // 2}
    assert run.requests[NamedClient("team/chat", "many/0", "")] == 2, "those with the fewest requests go first"
    assert run.count("third/one")
    assert len(run.requests) == MAX_NAMED


def test_what_is_removed_makes_room() -> None:
    run = Run()
    for number in range(MAX_NAMED):
        run.count(f"many/{number}", f"team/s{number % 2}")
    run.clients.remove_service("team/s1")
    run.clients.remove_client("many/0")
    run.clients.remove_client("none/0")
    assert len(run.requests) == MAX_NAMED // 2 - 1
    assert run.count("many/0")


async def test_a_revoked_key_has_no_series() -> None:
    key, resource = make_key("team/ann")
    async with (
        local_gateway(answering(web.json_response, data={}), resource) as gateway,
        aiohttp.ClientSession(headers={"x-api-key": key}) as http,
    ):

        async def read_metrics() -> str:
            async with http.get(f"{gateway.admin_url}/metrics") as got:
                return await got.text()

        for _ in range(2):
            async with http.post(f"{gateway.url}/completions", json={"prompt": "a"}) as got:
                assert got.status == 200
            assert 'client="team/ann"' in await read_metrics()
            gateway.server._catalog.keys.put({**resource, "spec": {**resource["spec"], "owner": "ann"}})
            assert 'client="team/ann",request_class="",owner=""' in await read_metrics(), (
                "a changed key keeps its series"
            )
            async with http.post(f"{gateway.url}/completions", json={"prompt": "a"}) as got:
                assert got.status == 200
            assert 'client="team/ann",request_class="",owner="team/ann"' in await read_metrics()
            gateway.server._catalog.keys.delete(resource)
            assert 'client="team/ann"' not in await read_metrics()
            gateway.server._catalog.keys.put(resource)


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_key_that_is_deleted_while_its_request_runs_gets_no_series_again(is_deleted: bool) -> None:
    has_come, go_on = asyncio.Event(), asyncio.Event()

    async def wait(_: web.Request) -> web.StreamResponse:
        has_come.set()
        await go_on.wait()
        return web.json_response({})

    key, resource = make_key("team/ann")
    async with local_gateway(wait, resource) as gateway, aiohttp.ClientSession() as http:
        url, headers = f"{gateway.url}/completions", {"x-api-key": key}
        sending = asyncio.create_task(http.post(url, json={"prompt": "a"}, headers=headers))
        await has_come.wait()
        if is_deleted:
            gateway.server._catalog.keys.delete(resource)
        go_on.set()
        (await sending).release()
        async with http.get(f"{gateway.admin_url}/metrics") as got:
            assert ('client="team/ann"' in await got.text()) != is_deleted
