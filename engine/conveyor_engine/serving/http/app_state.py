"""The state that all routes share. `server` builds it once."""

from dataclasses import dataclass

from starlette.requests import Request

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import Unavailable
from conveyor_engine.serving.adapter_file import AdapterFile
from conveyor_engine.serving.engine_client import EngineClient
from conveyor_engine.serving.http.callers import Callers
from conveyor_engine.serving.http.memory import Memory
from conveyor_engine.serving.http.request_spans import RequestSpans
from conveyor_engine.serving.http.usage import UsageReports
from conveyor_engine.serving.media import MediaFetcher
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.pool import WorkerPool
from conveyor_engine.wire.request import ModelFacts


@dataclass(frozen=True, slots=True)
class AppState:
    """The engine that the routes use, and the parts of the HTTP server."""

    config: EngineConfig
    model: ServedModel
    engine: EngineClient
    metrics: EngineMetrics
    workers: WorkerPool  # processes that validate and tokenize requests
    media: MediaFetcher  # fetches the images that bodies name by URL
    memory: Memory
    usage: UsageReports
    created: int  # Unix seconds
    adapters: AdapterFile | None = None  # those that may come and go
    callers: Callers | None = None  # who may use the engine; None: everyone
    spans: RequestSpans | None = None  # None: traces are not exported


def app_state(request: Request) -> AppState:
    state: AppState = request.app.state.conveyor
    return state


def model_facts(state: AppState) -> ModelFacts:
    """Return the facts about the loaded model. Raises Unavailable until the model is loaded."""
    if state.engine.facts is None:
        raise Unavailable("the engine is starting")
    return state.engine.facts
