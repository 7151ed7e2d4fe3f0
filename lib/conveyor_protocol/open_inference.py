"""Names of the Open Inference Protocol (version 2, REST) that gateway and engine both use. Pure."""

from typing import Final

# For a body with binary tensors: the length of the JSON part, in bytes. The tensors' data follows the JSON.
JSON_LENGTH_HEADER: Final = "Inference-Header-Content-Length"
MODEL_VERSION: Final = "1"  # the only version of each model
SERVER_PATH: Final = "/v2"
LIVE_PATH: Final = "/v2/health/live"
READY_PATH: Final = "/v2/health/ready"
_SERVER_NAME: Final = "conveyor"
_EXTENSIONS: Final = ("binary_tensor_data",)


def build_server_metadata(version: str) -> dict[str, object]:
    """Return the response to `GET /v2`."""
    return {"name": _SERVER_NAME, "version": version, "extensions": list(_EXTENSIONS)}


def build_path_parameters(path: str) -> list[dict[str, object]]:
    """Return the parameters of a path such as `/v2/models/{model}`, for an OpenAPI document."""
    named = (name for name in ("model", "version") if f"{{{name}}}" in path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named]
