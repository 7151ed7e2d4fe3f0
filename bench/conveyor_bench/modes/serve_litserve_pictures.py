"""Serves diffusers' pipeline with LitServe and its batching: `serve_litserve_pictures.py MODEL PORT BATCH STEPS`."""

import base64
import io
import sys
from pathlib import Path
from typing import Any

import litserve
import torch
from PIL import Image
from tests.engine.paint_models import open_pipeline

MODEL, PORT, BATCH, STEPS = sys.argv[1:]
WINDOW_SECONDS = 0.005  # the engine's default for Dynamic


class Painter(litserve.LitAPI):  # type: ignore[misc]
    """The pipeline. A batch is one call of it."""

    def setup(self, device: str) -> None:
        self._pipeline = open_pipeline(Path(MODEL))

    def decode_request(self, request: dict[str, Any]) -> dict[str, Any]:
        return request

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return inputs

    def predict(self, requests: list[dict[str, Any]]) -> list[Image.Image]:
        width, height = map(int, requests[0]["size"].split("x"))
        seeds = [torch.Generator().manual_seed(request["seed"]) for request in requests]
        prompts = [request["prompt"] for request in requests]
        made: list[Image.Image] = self._pipeline(
            prompts, width=width, height=height, num_inference_steps=int(STEPS), generator=seeds
        ).images
        return made

    def unbatch(self, output: list[Image.Image]) -> list[Image.Image]:
        return output

    def encode_response(self, output: Image.Image) -> dict[str, Any]:
        file = io.BytesIO()
        output.save(file, "PNG")
        return {"data": [{"b64_json": base64.b64encode(file.getvalue()).decode()}]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    api = Painter(max_batch_size=int(BATCH), batch_timeout=WINDOW_SECONDS)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=600)
    server.run(host="127.0.0.1", port=int(PORT), num_api_servers=1, generate_client_file=False, log_level="warning")
