"""Starts the engine of a model, alone or behind the gateway of `conveyor run`. Used by `__main__`."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.cli.local.running import Running, build_service
from tests.engine.processes import EngineServer
from tests.gateway.keys import make_api_key, make_key

from e2e.openapi_fuzz.models import ADAPTER, MODELS


@dataclass(frozen=True, slots=True)
class Door:
    """Where requests go, and what shows that the server still works."""

    http: httpx.Client  # its base URL is the one of the document's paths; its headers are those of all requests
    read_log: Callable[[], str]

    @property
    def url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    def is_ready(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def started(name: str, *, with_gateway: bool) -> Iterator[Door]:
    """Make the model, start its engine, and yield the door when the engine is ready."""
    with tempfile.TemporaryDirectory(prefix="conveyor-fuzz-") as folder:
        models = Path(folder) / "models"
        models.mkdir()
        MODELS[name].save(models / name)
        with (_behind_gateway if with_gateway else _alone)(name, Path(folder), models) as door:
            yield door


@contextmanager
def _alone(name: str, folder: Path, models: Path) -> Iterator[Door]:
    model = MODELS[name]
    settings: dict[str, object] = {"request_timeout_seconds": model.request_seconds_max}
    if model.context_tokens:
        settings["max_model_len"] = model.context_tokens
    if model.has_adapter:
        settings["adapters"] = f"{ADAPTER}={models / ADAPTER}"
    with EngineServer(folder, models / name, served_model_name=name, **settings) as server:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=150) as http:
            yield Door(http, lambda: server.log)


@contextmanager
def _behind_gateway(name: str, folder: Path, models: Path) -> Iterator[Door]:
    """Start a service that needs a key."""
    model = MODELS[name]
    spec: dict[str, object] = {
        "task": model.task,
        "access": {"mode": "Required"},
        "model": {"uri": f"pvc://models/{name}"},
        "requestTimeout": f"{model.request_seconds_max}s",
    }
    if model.context_tokens:
        spec["engine"] = {"device": "Auto", "dtype": "Float32", "maxModelLen": model.context_tokens}
    else:
        spec |= {"batching": {}, "kvCache": {}}
    if model.has_adapter:
        spec["adapters"] = [{"name": ADAPTER, "uri": f"pvc://models/{ADAPTER}"}]
    with Running(folder / "run", models, build_service(name, **spec), make_api_key("default")) as running:
        running.wait_ready()
        headers = {"Authorization": f"Bearer {make_key('default')}"}
        with httpx.Client(base_url=f"{running.root}/default/{name}", timeout=150, headers=headers) as http:
            yield Door(http, lambda: running.output)
