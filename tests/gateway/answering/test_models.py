"""The list of models, and each of them."""

import aiohttp
from tests.gateway.builders import make_directory, make_known_service
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, get

from conveyor_gateway.answering.models import build_model_list


async def test_the_root_lists_a_service_that_has_no_engine_and_its_path_lists_only_it(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    own_name = f"model-of-{stack.cluster.namespace}"
    await stack.apply_service(model={"uri": "hf://org/model", "name": own_name}, engine={"maxModelLen": 512})
    status, listed = await get(http, f"{gateway.url}/v1/models")
    assert (status, listed["object"]) == (200, "list")
    [found] = [model for model in listed["data"] if model["owned_by"] == stack.cluster.namespace]
    assert (found["id"], found["object"], found["max_model_len"]) == (own_name, "model", 512)
    assert found["created"] > 1_700_000_000
    assert await get(http, f"{stack.url}/models") == (200, {"object": "list", "data": [found]})


async def test_one_model_is_found_by_each_of_its_names(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    assert (await get(http, f"{gateway.url}/v1/models/{stack.key}"))[1]["id"] == stack.key
    assert (await get(http, f"{stack.url}/models/qwen"))[1]["id"] == "qwen"
    status, body = await get(http, f"{stack.url}/models/unserved")
    assert (status, body["error"]["message"]) == (404, f"{stack.key} serves the model 'qwen'")
    assert (await get(http, f"{gateway.url}/v1/models/unserved"))[0] == 404


def test_the_model_list_names_each_service_so_that_the_root_finds_it() -> None:
    directory = make_directory(
        make_known_service("a/one", "same"), make_known_service("b/two", "same"), make_known_service("b/three")
    )
    assert [model["id"] for model in build_model_list(None, directory)["data"]] == ["same", "three", "b/two"]
    assert [model["id"] for model in build_model_list("a/one", directory)["data"]] == ["same"]
