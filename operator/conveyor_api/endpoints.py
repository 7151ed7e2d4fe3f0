"""What a service answers: the one catalogue of paths, each with its method and its task. Pure.

The gateway routes by it; tests/contract/test_endpoints.py holds the engine to it. A new endpoint is a row here and a
route of the engine; the gateway learns of it only if its task is a new one.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Task(StrEnum):
    """What a client asks for."""

    GENERATE = "generate"  # of an engine, for a place in its queue
    EMBED = "embed"  # the same
    LIST_MODELS = "list_models"
    GET_MODEL = "get_model"
    STATUS = "status"  # whether requests are answered, and by which version
    DESCRIBE = "describe"  # all of this, as an OpenAPI document


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path below the base URL of a service; one that ends with `/` has a model's id behind it."""

    method: str
    path: str
    task: Task

    def matches(self, path: str) -> bool:
        return path.startswith(self.path) if self.path.endswith("/") else path == self.path


# Clients ask for the status beside /v1 and below it.
ENDPOINTS: Final = (
    Endpoint("POST", "/v1/completions", Task.GENERATE),
    Endpoint("POST", "/v1/chat/completions", Task.GENERATE),
    Endpoint("POST", "/v1/embeddings", Task.EMBED),
    Endpoint("GET", "/v1/models", Task.LIST_MODELS),
    Endpoint("GET", "/v1/models/", Task.GET_MODEL),
    *(Endpoint("GET", f"{base}/{page}", Task.STATUS) for base in ("", "/v1") for page in ("health", "ping", "version")),
    Endpoint("GET", "/openapi.json", Task.DESCRIBE),
)


def find_endpoint(path: str) -> Endpoint | None:
    """The endpoint of a path; the prefix that names the service is cut off already."""
    return next((endpoint for endpoint in ENDPOINTS if endpoint.matches(path)), None)
