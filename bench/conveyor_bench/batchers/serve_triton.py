# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy<2", "nvidia-pytriton==0.7.0", "sentence-transformers==6.2.*", "torch==2.15.*"]
# ///
"""Serves with Triton Inference Server and its dynamic batcher, from PyTriton's wheel.

The wheel's Python backend is built for the system's Python, so run this script with /usr/bin/python3.
"""

import sys
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig
from sentence_transformers import SentenceTransformer

MODEL, PORT, BATCH, WINDOW = sys.argv[1:]
model = SentenceTransformer(MODEL, device="cpu")


@batch  # type: ignore[untyped-decorator]
def embed(text: Any) -> dict[str, Any]:
    """Embed a batch. Texts have the shape (batch, 1), and vectors (batch, size)."""
    texts = [one[0].decode() for one in text]
    return {"vector": model.encode(texts, batch_size=int(BATCH), show_progress_bar=False)}


ports = {"http_port": int(PORT), "grpc_port": int(PORT) + 1, "metrics_port": int(PORT) + 2}
with Triton(config=TritonConfig(http_address="127.0.0.1", grpc_address="127.0.0.1", **ports)) as triton:
    triton.bind(
        model_name="embed",
        infer_func=embed,
        inputs=[Tensor(name="text", dtype=bytes, shape=(1,))],
        outputs=[Tensor(name="vector", dtype=np.float32, shape=(-1,))],
        config=ModelConfig(
            max_batch_size=int(BATCH),
            batcher=DynamicBatcher(max_queue_delay_microseconds=int(float(WINDOW) * 1e6)),
        ),
    )
    triton.serve()
