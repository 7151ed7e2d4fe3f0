"""Lists the engines, one for each task, and starts them. Used by `__main__`."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.engine.processes import EngineServer

from e2e import demo_model

REQUEST_SECONDS_MAX = 20.0
# The settings of each model's engine. A short context makes answers short. A picture may take half a second.
ENGINES: dict[str, dict[str, object]] = {
    demo_model.DEMO: {"max_model_len": 64},
    demo_model.EMBEDDING: {},
    demo_model.RERANKER: {},
    demo_model.CLASSIFIER: {},
    demo_model.IMAGE_CLASSIFIER: {},
    demo_model.IMAGE_EMBEDDING: {},
    demo_model.SPEECH: {},
    demo_model.PAINTER: {"request_timeout_seconds": 0.5},
    demo_model.PROGRAM: {},
}


@contextmanager
def started(model: str) -> Iterator[EngineServer]:
    """Start the engine of a model, and yield it when it is ready. The model is trained first if the cache lacks it."""
    settings = {"request_timeout_seconds": REQUEST_SECONDS_MAX, **ENGINES[model]}
    with tempfile.TemporaryDirectory(prefix="conveyor-fuzz-") as folder:
        server = EngineServer(Path(folder), demo_model.demo_model_directory(model), served_model_name=model, **settings)
        with server:
            yield server.wait_ready()
