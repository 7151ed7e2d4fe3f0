"""What every route needs, in one object made by `server`."""

from dataclasses import dataclass

from starlette.requests import Request

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import Unavailable
from conveyor_engine.serving.engine_client import EngineClient
from conveyor_engine.serving.http.memory import Memory
from conveyor_engine.serving.http.usage import UsageReports
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.pool import WorkerPool
from conveyor_engine.wire.request import ModelFacts


@dataclass(frozen=True, slots=True)
class AppState:
    """The engine behind the routes, and the HTTP side's own parts."""

    config: EngineConfig
    model: ServedModel
    engine: EngineClient
    metrics: EngineMetrics
    workers: WorkerPool  # validation and tokenizing, in processes of their own
    memory: Memory
    usage: UsageReports
    created: int  # Unix seconds


def app_state(request: Request) -> AppState:
    state: AppState = request.app.state.conveyor
    return state


def model_facts(state: AppState) -> ModelFacts:
    """The facts of the loaded model. Raises Unavailable before it is loaded."""
    if state.engine.facts is None:
        raise Unavailable("the engine is starting")
    return state.engine.facts
