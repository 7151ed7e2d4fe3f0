"""A real operator, gateway and engine: adapters come, change and go while requests run, and no pod is replaced."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.contract.test_start import publish_engine
from tests.engine.chat_model import write_chat_model
from tests.engine.lora import load, save_adapter
from tests.engine.processes import EngineServer
from tests.engine.tiny_models import greedy
from tests.gateway.process import GatewayProcess
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Space, Stage, wait_until

from conveyor_api import names

PROMPT, TOKENS = list(range(40, 60)), 12


def states(space: Space) -> dict[str, tuple[str, int]]:
    adapters = (space.need("InferenceService", "qwen").get("status") or {}).get("adapters", [])
    return {each["name"]: (each["state"], each.get("replicas", 0)) for each in adapters}


@contextmanager
def repeating(work: Callable[[], object], seconds: float = 0.1) -> Iterator[list[Exception]]:
    """Do the work again and again in a thread. Yields the exceptions."""
    stop, failed = threading.Event(), list[Exception]()

    def run() -> None:
        while not stop.wait(seconds):
            try:
                work()
            except Exception as error:
                failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield failed
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_adapters_come_change_and_go_with_no_pod_replaced_and_no_request_lost(
    stage: Stage, gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "ADAPTERS_PATH", str(tmp_path / "adapters"))  # where the engine of this test can read
    model, claim, file = write_chat_model(tmp_path / "tiny"), tmp_path / "adapters/claims/team", tmp_path / "list.yaml"
    answers = {name: greedy(save_adapter(model, claim / name, len(name)), PROMPT, TOKENS) for name in ("one", "three")}
    answers[""] = greedy(load(model), PROMPT, TOKENS)
    space, url = stage.space, f"{gateway.url}/{stage.space.namespace}/qwen/v1/completions"

    def send(name: str) -> httpx.Response:
        body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        return httpx.post(url, json=body, timeout=120)

    def answer(name: str) -> list[int]:
        got: Any = send(name)
        assert got.status_code == 200, got.text
        found: list[int] = got.json()["choices"][0]["token_ids"]
        return found

    def update_file() -> None:  # as the kubelet does
        file.write_text(space.need("ConfigMap", "qwen-engine-adapters")["data"]["adapters.yaml"])

    def ask() -> None:
        assert answer("qwen") == answers[""]
        assert answer("qwen:sql") in (answers["one"], answers["three"])

    sql = {"name": "sql", "uri": "pvc://team/one"}
    with stage.operator(), Kubelet(space, ready, addresses=False):
        space.make_service(adapters=[sql])
        wait_until("the list", lambda: space.get("ConfigMap", "qwen-engine-adapters"))
        update_file()
        fields = {"served_model_name": "qwen", "adapters_file": file, "host": "0.0.0.0"}
        with EngineServer(tmp_path / "engine", model, **fields) as engine:
            engine.wait_ready()
            wait_until("a pod", lambda: space.list("Pod"))
            uid = publish_engine(space, engine)
            wait_until("sql is loaded", lambda: states(space) == {"sql": ("Ready", 1)}, show=lambda: states(space))
            with repeating(update_file), repeating(ask) as failed:
                others = [{"name": "fr", "uri": "pvc://team/one"}, {"name": "bad", "uri": "pvc://team/none"}]
                space.edit("qwen", adapters=[sql | {"uri": "pvc://team/three"}, *others])
                wait_until("the gateway has the change", lambda: "fr" in gateway_models(gateway, space))
                assert answer("qwen:fr") == answers["one"], "the request waits for the adapter"
                found = {"sql": ("Ready", 1), "fr": ("Ready", 1), "bad": ("Failed", 0)}
                wait_until("one fails alone", lambda: states(space) == found, show=lambda: states(space))
                assert answer("qwen:sql") == answers["three"]
                wait_until("requests for it fail", lambda: send("qwen:bad").status_code == 404)
            assert not failed
            with repeating(update_file):
                space.edit("qwen", adapters=others[:1])
                wait_until("sql is gone", lambda: send("qwen:sql").status_code == 404)
                wait_until("fr is there", lambda: states(space) == {"fr": ("Ready", 1)}, show=lambda: states(space))
                assert answer("qwen:fr") == answers["one"]
        assert [pod["metadata"]["uid"] for pod in space.list("Pod")] == [uid]


def gateway_models(gateway: GatewayProcess, space: Space) -> set[str]:
    listed = json.loads(httpx.get(f"{gateway.url}/{space.namespace}/qwen/v1/models", timeout=30).text)["data"]
    return {each["id"].rpartition(":")[2] for each in listed}
