# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2", "ray[serve]==2.60.0", "sentence-transformers==6.2.*", "torch==2.15.*"]
# ///
"""Serves with Ray Serve and `@serve.batch`."""

import signal
import sys

import ray
from ray import serve
from sentence_transformers import SentenceTransformer
from starlette.requests import Request

MODEL, PORT, BATCH, WINDOW = sys.argv[1:]


@serve.deployment(max_ongoing_requests=1000)
class Embedder:
    """The model. There is one replica."""

    def __init__(self, model: str, batch: int) -> None:
        self._model, self._batch = SentenceTransformer(model, device="cpu"), batch

    @serve.batch(max_batch_size=int(BATCH), batch_wait_timeout_s=float(WINDOW))  # type: ignore[untyped-decorator]
    async def embed(self, texts: list[str]) -> list[list[float]]:
        return [
            vector.tolist() for vector in self._model.encode(texts, batch_size=self._batch, show_progress_bar=False)
        ]

    async def __call__(self, request: Request) -> list[float]:
        vector: list[float] = await self.embed((await request.json())["text"])
        return vector


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(PORT)})
serve.run(Embedder.bind(MODEL, int(BATCH)))  # type: ignore[attr-defined]
signal.sigwait({signal.SIGTERM, signal.SIGINT})
serve.shutdown()
ray.shutdown()
