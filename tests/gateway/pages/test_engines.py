"""Tests a gateway's pages with the metrics and the last steps of a service's engines."""

import contextlib
from typing import Any

from aiohttp import web
from tests.gateway.cluster import make_endpoint, make_service, make_slice, own_address
from tests.gateway.engine_servers import answering, running_engine

from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.pages.engines import read_engines, read_steps
from conveyor_gateway.watching.catalog import Catalog
from conveyor_protocol.engine_pages import MAX_STEPS, EngineSteps, StepRecord
from conveyor_protocol.pages import Engines

WANTED = (
    'vllm:time_to_first_token_seconds_bucket{le="0.1",model_name="a"} 1.0',
    "vllm:time_to_first_token_seconds_sum 0.5",
    "vllm:generation_tokens_total 7.0",
    "vllm:kv_cache_usage_perc 0.5",
)
OTHERS = ("# TYPE vllm:kv_cache_usage_perc gauge", "vllm:kv_cache_usage_percent 3", "process_open_fds 8.0")


def build_page(*lines: str) -> web.Response:
    return web.Response(text="\n".join(lines) + "\n")


async def test_only_the_wanted_families_are_returned_and_large_pages_are_left_out() -> None:
    async with (
        running_engine(answering(lambda: build_page(*OTHERS, *WANTED))) as one,
        running_engine(answering(lambda: build_page(*WANTED, *([f"{WANTED[-1]}"] * 2000)))) as hostile,
        running_engine(answering(lambda: web.Response(status=500))) as broken,
    ):
        catalog = Catalog()
        catalog.services.put(make_service("qwen", "default"))
        for number, engine in enumerate((one, hostile, broken)):
            endpoint = make_endpoint(own_address()) | {"targetRef": {"kind": "Pod", "uid": f"uid-{number}"}}
            catalog.slices.put(make_slice(f"qwen-{number}", "default", "qwen", engine.port, endpoint))
        ledger = Ledger(1 << 22)
        page = await read_engines(catalog, ledger, "default/qwen")
        assert page == Engines({f"{own_address()}:{one.port}": "\n".join(WANTED)})
        assert await read_engines(catalog, ledger, "default/other") == Engines({})
        assert ledger.bytes.total == 0


STEP: dict[str, Any] = {
    "ended": 1.5, "seconds": 0.5, "rows": 2, "tokens": 9, "prompt_tokens": 7, "generated_tokens": 2,
    "padding_share": 0.25, "waiting": 1, "closed_by": "full",
}  # fmt: skip


async def test_steps_of_engines_that_send_others_than_the_type_allows_are_left_out() -> None:
    hostile = ({**STEP, "closed_by": "<script>"}, {**STEP, "rows": 10**12}, {**STEP, "padding_share": -1}, "x")
    bodies: list[Any] = [[STEP] * 3, [STEP] * (MAX_STEPS + 1), *([each] for each in hostile)]
    async with contextlib.AsyncExitStack() as opened:
        engines = [
            await opened.enter_async_context(running_engine(answering(web.json_response, data=body))) for body in bodies
        ]
        catalog = Catalog()
        catalog.services.put(make_service("qwen", "default"))
        for number, engine in enumerate(engines):
            endpoint = make_endpoint(own_address()) | {"targetRef": {"kind": "Pod", "uid": f"uid-{number}"}}
            catalog.slices.put(make_slice(f"qwen-{number}", "default", "qwen", engine.port, endpoint))
        page = await read_steps(catalog, Ledger(1 << 22), "default/qwen")
    assert page == EngineSteps({f"{own_address()}:{engines[0].port}": [StepRecord(**STEP)] * 3})
