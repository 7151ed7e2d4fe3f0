# /// script
# requires-python = ">=3.11"
# dependencies = ["fastapi==0.165.*", "numpy>=2", "sentence-transformers==6.2.*", "torch==2.15.*", "uvicorn==0.54.*"]
# ///
"""Serves with sentence-transformers and FastAPI, one text at a time. This is the baseline without a batcher."""

import sys
import threading

import uvicorn
from fastapi import Body, FastAPI
from sentence_transformers import SentenceTransformer

MODEL, PORT, *_ = sys.argv[1:]
app, model, one = FastAPI(), SentenceTransformer(MODEL, device="cpu"), threading.Lock()


@app.post("/embed")
def embed(text: str = Body(embed=True)) -> list[float]:
    """Embed in one of FastAPI's threads. The lock prevents the threads from computing at once on the same cores."""
    with one:
        vector: list[float] = model.encode(text, show_progress_bar=False).tolist()
    return vector


uvicorn.run(app, host="127.0.0.1", port=int(PORT), log_level="warning")
