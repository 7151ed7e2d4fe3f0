# /// script
# requires-python = ">=3.11"
# dependencies = ["litserve==0.2.19", "numpy>=2", "sentence-transformers==6.2.*", "torch==2.15.*"]
# ///
"""Serves with LitServe and its batching."""

import sys
from typing import Any

import litserve
from sentence_transformers import SentenceTransformer

MODEL, PORT, BATCH, WINDOW = sys.argv[1:]


class Embedder(litserve.LitAPI):  # type: ignore[misc]
    """The model. A batch is a list of texts, which sentence-transformers pads."""

    def setup(self, device: str) -> None:
        self._model = SentenceTransformer(MODEL, device="cpu")

    def decode_request(self, request: dict[str, str]) -> str:
        return request["text"]

    def batch(self, inputs: list[str]) -> list[str]:
        return inputs

    def predict(self, texts: list[str]) -> Any:
        return self._model.encode(texts, batch_size=int(BATCH), show_progress_bar=False)

    def unbatch(self, output: Any) -> list[Any]:
        return list(output)

    def encode_response(self, output: Any) -> list[float]:
        vector: list[float] = output.tolist()
        return vector


if __name__ == "__main__":
    api = Embedder(max_batch_size=int(BATCH), batch_timeout=float(WINDOW))
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=120)
    server.run(host="127.0.0.1", port=int(PORT), num_api_servers=1, generate_client_file=False, log_level="warning")
