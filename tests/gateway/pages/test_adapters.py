"""Tests a gateway's report of what engines have made of a service's adapters."""

from typing import Any

from aiohttp import web
from tests.gateway.cluster import make_endpoint, make_service, make_slice, own_address
from tests.gateway.engine_servers import answering, running_engine

from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.pages.adapters import read_adapters
from conveyor_gateway.watching.catalog import Catalog
from conveyor_protocol.pages import AdapterCounts, Adapters

QWEN = "default/qwen"


def load(**adapters: dict[str, Any]) -> dict[str, Any]:
    return {"data": adapters}


def state(word: str, directory: str = "/new", **more: Any) -> dict[str, Any]:
    return {"state": word, "directory": directory, "serves": word == "Ready", **more}


async def test_engines_are_counted_by_adapter_and_directory() -> None:
    first = load(sql=state("Ready"), fr=state("Failed", message="no memory"), gone=state("Ready"))
    second = load(sql=state("Ready", "/old"), fr=state("Loading", serves=True))
    async with (
        running_engine(answering(web.json_response, **first)) as one,
        running_engine(answering(web.json_response, **second)) as two,
        running_engine(answering(web.json_response, **load(sql=state("Wrong")))) as wrong,
    ):
        catalog = Catalog()
        adapters = [{"name": name, "uri": f"hf://org/{name}"} for name in ("sql", "fr", "de")]
        catalog.services.put(make_service("qwen", "default", adapters=adapters))
        for number, engine in enumerate((one, two, wrong)):
            endpoint = make_endpoint(own_address()) | {"targetRef": {"kind": "Pod", "uid": f"uid-{number}"}}
            catalog.slices.put(make_slice(f"qwen-{number}", "default", "qwen", engine.port, endpoint))
        page = await read_adapters(catalog, Ledger(1 << 20), QWEN)
    assert page == Adapters(
        {
            "sql": {"/new": AdapterCounts(ready=1, serving=1), "/old": AdapterCounts(ready=1, serving=1)},
            "fr": {"/new": AdapterCounts(failed=1, serving=1, message="no memory")},
            "de": {},
        }
    )
    assert await read_adapters(catalog, Ledger(1 << 20), "other/qwen") == Adapters({})
