"""Lists all paths of a service, each with its method and its kind. Pure.

The gateway routes by this list, and tests/contract/test_endpoints.py checks the engine against it. A new endpoint needs
a row here and a route in the engine.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

from conveyor_protocol.tasks import TASKS
from conveyor_protocol.uploads import AUDIO_BYTES_MAX

# What a model must do, and the tasks of models that do it. Tasks that packages bring may answer any path.
TASKS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "generates text": ("Generate",),
    "reads text": ("Generate", "Embed", "Classify", "Rerank"),
    "embeds": ("Embed",),
    "ranks or embeds": ("Embed", "Rerank"),
    "classifies": ("Classify",),
    "classifies images": ("ImageClassify",),
    "transcribes": ("Transcribe",),
    "generates images": ("ImageGenerate",),
    "takes tensors": ("ImageClassify", "Custom"),
}


class EndpointKind(StrEnum):
    """How the gateway handles a request."""

    ENGINE = "engine"  # sends it to an engine that can take it
    LIST_MODELS = "list_models"
    GET_MODEL = "get_model"
    STATUS = "status"  # whether the service is ready, and its version
    ENGINE_PAGE = "engine_page"  # facts about the model, from any engine of the service
    DESCRIBE = "describe"  # all endpoints, as an OpenAPI document


@dataclass(frozen=True)
class Endpoint:
    """A path below the base URL of a service. `{model}` stands for the id of any model, `{version}` for its version."""

    method: str
    path: str
    kind: EndpointKind
    models: str = ""  # for `ENGINE`: what the model must do so that an engine answers the path
    may_stream: bool = False  # whether a client may request the answer as events
    max_bytes: int = 0  # limit of the body, if it may be larger than on other paths
    fields: tuple[str, ...] = ()  # in JSON bodies: each entry has all required fields; one entry is enough

    def suits(self, task: str | None) -> bool:
        """Return whether engines with this task may answer. task: None if it is not known."""
        return task not in TASKS or not self.models or task in TASKS_OF[self.models]

    def match(self, path: str) -> dict[str, str] | None:
        """Return the model and the version in the path, as written; None if the path does not match."""
        match = self._pattern.fullmatch(path)
        return None if match is None else match.groupdict()

    @cached_property
    def required(self) -> tuple[frozenset[str], ...]:
        """Return the sets of fields of which a JSON body must have one whole; without a set, it needs no field."""
        return tuple(frozenset(entry.split()) for entry in self.fields)

    @cached_property
    def has_model(self) -> bool:
        return "{model}" in self.path

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        pattern = re.escape(self.path).replace(r"\{model\}", "(?P<model>.+)")
        return re.compile(pattern.replace(r"\{version\}", "(?P<version>[^/]+)"))


# The Open Inference Protocol has a path for a model and one for each version of it. The first match counts.
MODELS_OF_V2: Final = ("/v2/models/{model}/versions/{version}", "/v2/models/{model}")
_PAIRS: Final = ("text_1 text_2", "queries documents", "queries items", "data_1 data_2")
# Clients request the status both next to /v1 and below it.
ENDPOINTS: Final = (
    Endpoint("POST", "/v1/completions", EndpointKind.ENGINE, "generates text", may_stream=True, fields=("prompt",)),
    Endpoint(
        "POST", "/v1/chat/completions", EndpointKind.ENGINE, "generates text", may_stream=True, fields=("messages",)
    ),
    Endpoint("POST", "/v1/responses", EndpointKind.ENGINE, "generates text", may_stream=True, fields=("input",)),
    Endpoint(
        "POST", "/v1/messages", EndpointKind.ENGINE, "generates text", may_stream=True, fields=("messages max_tokens",)
    ),
    Endpoint("POST", "/v1/messages/count_tokens", EndpointKind.ENGINE, "generates text", fields=("messages",)),
    Endpoint("POST", "/tokenize", EndpointKind.ENGINE, "reads text", fields=("prompt", "messages", "inputs")),
    Endpoint("POST", "/detokenize", EndpointKind.ENGINE, "reads text", fields=("tokens",)),
    Endpoint("POST", "/decode", EndpointKind.ENGINE, "reads text", fields=("ids",)),
    *(Endpoint("GET", path, EndpointKind.ENGINE_PAGE) for path in ("/tokenizer_info", "/info")),
    Endpoint("POST", "/v1/embeddings", EndpointKind.ENGINE, "embeds", fields=("input", "messages")),
    Endpoint("POST", "/pooling", EndpointKind.ENGINE, "embeds", fields=("input", "messages")),
    *(
        Endpoint("POST", path, EndpointKind.ENGINE, "embeds", fields=("inputs",))
        for path in ("/embed", "/embed_sparse", "/embed_all")
    ),
    *(
        Endpoint("POST", path, EndpointKind.ENGINE, "ranks or embeds", fields=("query documents",))
        for path in ("/v1/rerank", "/v2/rerank")
    ),
    Endpoint("POST", "/rerank", EndpointKind.ENGINE, "ranks or embeds", fields=("query texts",)),
    *(
        Endpoint("POST", path, EndpointKind.ENGINE, "ranks or embeds", fields=_PAIRS)
        for path in ("/v1/score", "/score")
    ),
    Endpoint("POST", "/classify", EndpointKind.ENGINE, "classifies", fields=("input", "messages")),
    Endpoint("POST", "/predict", EndpointKind.ENGINE, "classifies", fields=("inputs",)),
    Endpoint("POST", "/v1/images/classify", EndpointKind.ENGINE, "classifies images", fields=("images",)),
    *(
        Endpoint("POST", path, EndpointKind.ENGINE, "transcribes", may_stream=True, max_bytes=AUDIO_BYTES_MAX)
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations")
    ),
    Endpoint(
        "POST", "/v1/images/generations", EndpointKind.ENGINE, "generates images", may_stream=True, fields=("prompt",)
    ),
    Endpoint("POST", "/v1/images/edits", EndpointKind.ENGINE, "generates images", may_stream=True),
    *(
        Endpoint("POST", f"{model}/infer", EndpointKind.ENGINE, "takes tensors", fields=("inputs",))
        for model in MODELS_OF_V2
    ),
    *(Endpoint("GET", f"{model}/ready", EndpointKind.ENGINE_PAGE) for model in MODELS_OF_V2),
    *(Endpoint("GET", model, EndpointKind.ENGINE_PAGE) for model in MODELS_OF_V2),
    Endpoint("GET", "/v1/models", EndpointKind.LIST_MODELS),
    Endpoint("GET", "/v1/models/{model}", EndpointKind.GET_MODEL),
    *(
        Endpoint("GET", f"{base}/{page}", EndpointKind.STATUS)
        for base in ("", "/v1")
        for page in ("health", "ping", "version")
    ),
    *(Endpoint("GET", path, EndpointKind.STATUS) for path in ("/v2", "/v2/health/live", "/v2/health/ready")),
    Endpoint("GET", "/openapi.json", EndpointKind.DESCRIBE),
)


_BY_PATH: Final = {endpoint.path: endpoint for endpoint in ENDPOINTS if not endpoint.has_model}
_WITH_MODEL: Final = tuple(endpoint for endpoint in ENDPOINTS if endpoint.has_model)


def find_endpoint(path: str) -> Endpoint | None:
    """Return the endpoint of a path, without the prefix that names the service; None if there is none."""
    exact = _BY_PATH.get(path)
    return exact or next((endpoint for endpoint in _WITH_MODEL if endpoint.match(path) is not None), None)
