"""Tests the pages of the admin port."""

import aiohttp
import pytest
from tests.gateway.process import GatewayProcess


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_probes_are_on_both_ports(gateway: GatewayProcess, http: aiohttp.ClientSession, path: str) -> None:
    for port in (gateway.port, gateway.admin_port):
        async with http.get(f"http://127.0.0.1:{port}{path}") as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("POST", "/demand", 405)])
async def test_the_admin_port_has_only_its_pages(
    gateway: GatewayProcess, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    async with http.request(method, f"http://127.0.0.1:{gateway.admin_port}{path}") as answer:
        assert answer.status == status
