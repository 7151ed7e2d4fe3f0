"""Tests that a real server follows the file of its adapters: it loads, replaces and unloads them while it answers."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.engine.lora import load, save_adapter
from tests.engine.processes import EngineServer, wait_until
from tests.engine.tiny_models import greedy

from conveyor_protocol.request_headers import UNKNOWN_MODEL_HEADER

PROMPT = list(range(40, 60))
TOKENS = 12
SEEDS = {"one": 1, "two": 2, "three": 3}


class Followed:
    """A server, the file that it follows, and PEFT's answers with each of three adapters."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.file = model, folder, folder / "adapters.yaml"
        models = {name: save_adapter(model, folder / name, seed) for name, seed in SEEDS.items()}
        self.answers = {name: greedy(each, PROMPT, TOKENS) for name, each in models.items()}
        self.answers[""] = greedy(load(model), PROMPT, TOKENS)
        save_adapter(model, folder / "bad", 9)
        config = folder / "bad" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))

    def write(self, **folders: str) -> None:
        content = {
            name: {"uri": f"pvc://claim/{at}", "directory": str(self.folder / at)} for name, at in folders.items()
        }
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(content))
        new.rename(self.file)


@pytest.fixture(scope="module")
def followed(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Followed:
    return Followed(chat_model, tmp_path_factory.mktemp("followed"))


@pytest.fixture
def server(followed: Followed) -> Iterator[EngineServer]:
    followed.write(sql="one", spoilt="bad")
    with EngineServer(
        followed.folder / "server", followed.model, adapters_file=followed.file, max_num_seqs=4
    ) as server:
        yield server.wait_ready()


def complete(server: EngineServer, name: str, **more: Any) -> Any:
    body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, **more}
    return server.post("/v1/completions", body)


def tokens(server: EngineServer, name: str) -> list[int]:
    answer = complete(server, name)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def states(server: EngineServer) -> dict[str, str]:
    return {name: state["state"] for name, state in server.get("/adapters").json().items()}


def test_adapters_come_change_and_go_while_requests_run(server: EngineServer, followed: Followed) -> None:
    assert states(server) == {"sql": "Ready", "spoilt": "Failed"}, "a ready engine has tried each of them"
    spoilt = server.get("/adapters").json()["spoilt"]
    assert spoilt["reason"] == "UnsupportedModel"
    assert "the adapter 'spoilt' cannot be used: " in spoilt["message"]
    refused = complete(server, "tiny:spoilt")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert UNKNOWN_MODEL_HEADER in refused.headers, "a gateway may try another engine"
    assert tokens(server, "tiny:sql") == followed.answers["one"]

    stop, failed = threading.Event(), []

    def keep_asking() -> None:
        while not stop.is_set():
            try:
                assert tokens(server, "tiny") == followed.answers[""]
                assert tokens(server, "tiny:sql") in (followed.answers["one"], followed.answers["two"])
            except Exception as error:
                failed.append(error)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    followed.write(sql="two", fr="three", spoilt="bad")
    wait_until(lambda: states(server) == {"sql": "Ready", "fr": "Ready", "spoilt": "Failed"}, "changed", server)
    assert tokens(server, "tiny:fr") == followed.answers["three"]
    wait_until(lambda: tokens(server, "tiny:sql") == followed.answers["two"], "replaced", server)
    stop.set()
    asking.join()
    assert not failed

    followed.write(fr="three", spoilt="one")
    wait_until(lambda: states(server) == {"fr": "Ready", "spoilt": "Ready"}, "removed and mended", server)
    assert complete(server, "tiny:sql").status_code == 404
    assert tokens(server, "tiny:spoilt") == followed.answers["one"]
    assert [each["id"] for each in server.get("/v1/models").json()["data"]] == ["tiny", "tiny:spoilt", "tiny:fr"]

    followed.write(fr="bad", spoilt="one", gone="nowhere")
    wait_until(lambda: states(server) == {"spoilt": "Ready", "fr": "Failed", "gone": "Failed"}, "failed", server)
    gone = server.get("/adapters").json()["gone"]
    assert (gone["reason"], gone["serves"]) == ("ModelNotFound", False)
    assert gone["message"].startswith("adapter gone: pvc://claim/nowhere: there is no directory")
    assert server.get("/adapters").json()["fr"]["serves"]
    assert tokens(server, "tiny:fr") == followed.answers["three"], "the old one answers on"

    followed.file.write_text("{")
    wait_until(lambda: "event=adapters_file_refused" in server.log, "refused", server)
    assert tokens(server, "tiny:fr") == followed.answers["three"]


# sglang#36894: an unload never ended after requests with many choices. vllm#13698: a load beside them ended the engine.
def test_an_adapter_goes_and_comes_back_beside_requests_with_many_choices(
    server: EngineServer, followed: Followed
) -> None:
    more = {"n": 16, "max_tokens": 100, "ignore_eos": True}
    (alone,) = complete(server, "tiny:sql", **more | {"n": 1}).json()["choices"]
    assert alone["token_ids"][:TOKENS] == followed.answers["one"]
    with ThreadPoolExecutor(4) as clients:
        open_requests = [clients.submit(complete, server, "tiny:sql", **more) for _ in range(3)]
        wait_until(lambda: server.load()["running"] > 0, "requests run", server)
        followed.write()
        wait_until(lambda: complete(server, "tiny:sql").status_code == 404, "takes no more requests", server)
        followed.write(fr="three")  # it would get the place of the other, if that were free
        wait_until(lambda: states(server).get("fr") == "Ready", "loaded beside them", server)
        assert server.load()["running"] > 0
        for each in open_requests:
            answer = each.result()
            assert answer.status_code == 200, answer.text
            assert {tuple(choice["token_ids"]) for choice in answer.json()["choices"]} == {tuple(alone["token_ids"])}
    wait_until(lambda: states(server) == {"fr": "Ready"}, "unloaded", server)
    followed.write(sql="one", fr="three")
    wait_until(lambda: states(server).get("sql") == "Ready", "came back", server)
    assert tokens(server, "tiny:sql") == followed.answers["one"]
    assert tokens(server, "tiny") == followed.answers[""]
