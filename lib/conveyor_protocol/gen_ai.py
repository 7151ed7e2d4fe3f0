"""The attributes of spans by OpenTelemetry's semantic conventions for generative AI, which gateway and engine share.

Names: https://github.com/open-telemetry/semantic-conventions-genai, docs/gen-ai/client-inference.md. Pure.
"""

from typing import Final

_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/embed": "embeddings",
    "/embed_sparse": "embeddings",
    "/embed_all": "embeddings",
    "/pooling": "embeddings",
}
_INFER: Final = "/v2/models/{model}/infer"


def describe_operation(path: str) -> dict[str, str]:
    """Return the attributes of a request for this path of the API. Only some paths have an operation's name."""
    route = _INFER if path.startswith("/v2/models/") else path  # otherwise each model would be a route
    attributes = {"gen_ai.provider.name": "conveyor", "http.route": route}
    if (operation := _OPERATIONS.get(path)) is not None:
        attributes["gen_ai.operation.name"] = operation
    return attributes
