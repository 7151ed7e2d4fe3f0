"""The catalogue of all paths of a service, each with its method and its kind. Pure.

The gateway routes by it; tests/contract/test_endpoints.py holds the engine to it. A new endpoint is a row here and a
path of a task in the engine.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """How the gateway handles a request."""

    ENGINE = "engine"  # sends it to an engine, once that has a place for it
    LIST_MODELS = "list_models"
    GET_MODEL = "get_model"
    STATUS = "status"  # whether requests are answered, and by which version
    DESCRIBE = "describe"  # all of this, as an OpenAPI document


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path below the base URL of a service; one that ends with `/` has a model's id behind it."""

    method: str
    path: str
    kind: Kind
    models: str = ""  # what a model does that an engine answers it for; of `ENGINE`
    may_stream: bool = False  # whether a client may ask for the answer as events

    def matches(self, path: str) -> bool:
        return path.startswith(self.path) if self.path.endswith("/") else path == self.path


# Clients ask for the status beside /v1 and below it.
ENDPOINTS: Final = (
    Endpoint("POST", "/v1/completions", Kind.ENGINE, "generates text", may_stream=True),
    Endpoint("POST", "/v1/chat/completions", Kind.ENGINE, "generates text", may_stream=True),
    Endpoint("POST", "/v1/responses", Kind.ENGINE, "generates text", may_stream=True),
    Endpoint("POST", "/v1/messages", Kind.ENGINE, "generates text", may_stream=True),
    Endpoint("POST", "/v1/messages/count_tokens", Kind.ENGINE, "generates text"),
    *(Endpoint("POST", path, Kind.ENGINE, "generates text") for path in ("/tokenize", "/detokenize")),
    *(Endpoint("POST", path, Kind.ENGINE, "embeds") for path in ("/v1/embeddings", "/embed")),
    *(Endpoint("POST", path, Kind.ENGINE, "ranks") for path in ("/v1/rerank", "/v2/rerank", "/v1/score", "/rerank")),
    *(Endpoint("POST", path, Kind.ENGINE, "classifies") for path in ("/classify", "/predict")),
    Endpoint("GET", "/v1/models", Kind.LIST_MODELS),
    Endpoint("GET", "/v1/models/", Kind.GET_MODEL),
    *(Endpoint("GET", f"{base}/{page}", Kind.STATUS) for base in ("", "/v1") for page in ("health", "ping", "version")),
    Endpoint("GET", "/openapi.json", Kind.DESCRIBE),
)


def find_endpoint(path: str) -> Endpoint | None:
    """The endpoint of a path; the prefix that names the service is cut off already."""
    return next((endpoint for endpoint in ENDPOINTS if endpoint.matches(path)), None)
