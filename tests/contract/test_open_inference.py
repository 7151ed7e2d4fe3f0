"""Tests the Open Inference Protocol with Triton's client and a real gateway, at a service's base URL and the root."""

import asyncio
import io
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.http as triton
from tests.contract.serving import serving
from tests.engine.processes import EngineServer
from tests.engine.tasks.softmax_model import install_softmax, write_softmax_model
from tests.gateway.process import GatewayProcess
from tritonclient.utils import InferenceServerException

from conveyor_gateway.relaying.bodies import MAX_ROUTED_BYTES
from e2e.cluster.api import Api
from e2e.cluster.paths import REPOSITORY

ROWS = np.array([[1, 2, 3], [0.5, 0.25, -4]], dtype=np.float32)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("softmax")
    packages, model = install_softmax(folder), write_softmax_model(folder / "tiny", 2.0)
    with EngineServer(folder / "engine", model, packages=packages, host="0.0.0.0", max_num_seqs=4) as engine:
        yield engine.wait_ready()


def send(url: str, model: str, call: Callable[[triton.InferenceServerClient, str], Any]) -> Any:
    with triton.InferenceServerClient(url.removeprefix("http://"), network_timeout=60) as client:
        return call(client, model)


def infer(client: triton.InferenceServerClient, model: str, rows: Any = ROWS) -> Any:
    numbers = triton.InferInput("numbers", list(rows.shape), "FP32")
    numbers.set_data_from_numpy(rows)
    return client.infer(model, [numbers]).as_numpy("probabilities")


async def test_tritons_client_works_unchanged(
    engine: EngineServer, gateway: GatewayProcess, crd: Api, namespace: str
) -> None:
    async with serving(engine, [gateway], crd, namespace) as service:
        base = f"{gateway.url}/{service}"
        expected = np.exp(ROWS / 2) / np.exp(ROWS / 2).sum(axis=1, keepdims=True)
        for url, model in ((base, "tiny"), (gateway.url, service)):
            assert await asyncio.to_thread(send, url, model, lambda client, _: client.is_server_live())
            assert await asyncio.to_thread(send, url, model, lambda client, _: client.is_server_ready())
            assert await asyncio.to_thread(send, url, model, lambda client, name: client.is_model_ready(name, "1"))
            metadata = await asyncio.to_thread(send, url, model, lambda client, _: client.get_server_metadata())
            assert metadata["extensions"] == ["binary_tensor_data"]
            metadata = await asyncio.to_thread(send, url, model, lambda client, name: client.get_model_metadata(name))
            assert (metadata["name"], metadata["inputs"][0]["shape"]) == ("tiny", [-1, -1])
            assert np.abs(await asyncio.to_thread(send, url, model, infer) - expected).max() < 1e-6
            for call, words in (
                (lambda client, name: client.get_model_metadata("other"), "other"),
                (lambda client, name: client.get_model_metadata(name, "2"), "the model has only version '1'"),
                (lambda client, name: infer(client, "other"), "other"),
                (lambda client, name: infer(client, name, np.zeros((1, 9), np.float32)), "n is 1 to 8"),
            ):
                with pytest.raises(InferenceServerException, match=words) as caught:
                    await asyncio.to_thread(send, url, model, call)
                assert caught.value.status() in ("400", "404")
        with pytest.raises(InferenceServerException, match="there is no service 'none' in namespace 'default'"):
            await asyncio.to_thread(send, f"{gateway.url}/default/none", "x", infer)
        await check_long_bodies(gateway, service)


async def test_the_page_shows_a_client_that_works(
    engine: EngineServer, gateway: GatewayProcess, crd: Api, namespace: str
) -> None:
    shown = re.search(r"```python\n(.*?)```", (REPOSITORY / "docs/open-inference.md").read_text(), re.DOTALL)
    assert shown
    async with serving(engine, [gateway], crd, namespace):
        names = {"GATEWAY": gateway.url.removeprefix("http://"), "NAMESPACE": namespace, "NAME": "tiny"}
        program = re.sub("GATEWAY|NAMESPACE|NAME", lambda match: names[match[0]], shown[1])
        run = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
        printed, _ = await run.communicate()
    assert printed.decode().count("0.33333334") == 6


async def check_long_bodies(gateway: GatewayProcess, service: str) -> None:
    """Check that the gateway passes on a body longer than MAX_ROUTED_BYTES at the root. The engine refuses it.

    The limit is for bodies that name the model. Here the path names it.
    """
    body = b'{"inputs":[{"name":"numbers","shape":[1,1],"datatype":"FP32","data":[1]}]' + b" " * MAX_ROUTED_BYTES + b"}"
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{gateway.url}/v2/models/{service}/infer", data=io.BytesIO(body)) as answer,
    ):
        document = await answer.json()
    assert (answer.status, document["error"]) == (
        413,
        "the body is longer than 1048576 bytes, the most that this model needs",
    )
