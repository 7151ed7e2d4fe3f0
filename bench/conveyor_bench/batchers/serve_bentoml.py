# /// script
# requires-python = ">=3.11"
# dependencies = ["bentoml==1.4.40", "numpy>=2", "sentence-transformers==6.2.*", "torch==2.15.*"]
# ///
"""Serves with BentoML and its adaptive batching, as in its examples: the script starts `bentoml serve` on itself."""

import os
import sys
from pathlib import Path
from typing import Any

import bentoml
import numpy as np
from sentence_transformers import SentenceTransformer


@bentoml.service(workers=1, traffic={"timeout": 120})
class Embedder:
    """The model. BentoML chooses the window itself, from the times of earlier batches."""

    def __init__(self) -> None:
        self._model = SentenceTransformer(os.environ["MODEL"], device="cpu")

    @bentoml.api(batchable=True, max_batch_size=int(os.environ.get("BATCH", "32")))  # type: ignore[untyped-decorator]
    def embed(self, texts: list[str]) -> np.ndarray:
        vectors: np.ndarray[Any, Any] = self._model.encode(texts, show_progress_bar=False)
        return vectors


if __name__ == "__main__":
    os.environ["MODEL"], port, os.environ["BATCH"], _ = sys.argv[1:]
    script = Path(__file__)
    options = ["--working-dir", str(script.parent), "--host", "127.0.0.1", "--port", port]
    command = [sys.executable, "-m", "bentoml", "serve", f"{script.stem}:Embedder", *options]
    os.execv(sys.executable, command)
