"""Runs services whose pods are engine processes.

Operator, gateway, API server and engines are real, kubelets are not.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.contract.conftest import gateway, space, stage
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.cluster import make_endpoint, make_slice, own_address
from tests.operator.kubelet import Kubelet, ready, running
from tests.operator.stage import Space, Stage

from conveyor_api import names

__all__ = ["gateway", "space", "stage"]

Json = dict[str, Any]
OURS = ("model", "device", "dtype", "port", "drain_timeout_seconds")


class EnginePods(Kubelet):
    """Runs the engine of each pod of a namespace as a process, with the configuration of the pod's ConfigMap."""

    def __init__(self, space: Space, model: Path, folder: Path) -> None:
        super().__init__(space, self._decide, addresses=False)
        self._model, self._folder = model, folder
        self._engines: dict[str, EngineServer] = {}
        self.program = IDLE
        self.configs: list[Json] = []
        """Of the engines that were started, in order."""

    def __exit__(self, *arguments: object) -> None:
        super().__exit__(*arguments)
        for engine in self._engines.values():
            engine.__exit__()

    def _play(self, pod: Json) -> None:
        if names.INFERENCE_SERVICE_LABEL not in pod["metadata"].get("labels", {}):
            return  # the gateway's
        name = pod["metadata"]["name"]
        if "deletionTimestamp" in pod["metadata"] and name in self._engines:
            self._space.delete("EndpointSlice", name)
            self._engines.pop(name).__exit__()
        super()._play(pod)

    def _decide(self, pod: Json) -> Json:
        name = pod["metadata"]["name"]
        if name not in self._engines:
            self._engines[name] = self._start(pod)
        engine = self._engines[name]
        if "event=listening" not in engine.log or engine.get("/readyz").status_code != 200:
            return running(pod, ready=False)
        self._publish(pod, engine)
        return ready(pod, '{"contextLength": 8192, "task": "generate"}')

    def _start(self, pod: Json) -> EngineServer:
        (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == names.CONFIG_VOLUME]
        data = self._space.need("ConfigMap", volume["configMap"]["name"])["data"]
        config = yaml.safe_load(data[names.ENGINE_CONFIG_KEY])
        self.configs.append(config)
        fields = {name: value for name, value in config.items() if name not in OURS}
        folder = self._folder / pod["metadata"]["name"]
        return EngineServer(folder, self._model, self.program, host="0.0.0.0", drain_timeout_seconds=0, **fields)

    def _publish(self, pod: Json, engine: EngineServer) -> None:
        metadata = pod["metadata"]
        if self._space.get("EndpointSlice", metadata["name"]) is None:
            target = {"targetRef": {"kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}}
            service, port = metadata["labels"][names.INFERENCE_SERVICE_LABEL], int(engine.url.rpartition(":")[2])
            endpoint = make_endpoint(own_address()) | target
            self._space.apply(
                "EndpointSlice", make_slice(metadata["name"], self._space.namespace, service, port, endpoint)
            )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def pods(stage: Stage, model: Path, tmp_path: Path) -> Iterator[EnginePods]:
    with stage.operator(), EnginePods(stage.space, model, tmp_path) as pods:
        yield pods


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets kubectl find the plugin, which is in the same folder as Python."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
