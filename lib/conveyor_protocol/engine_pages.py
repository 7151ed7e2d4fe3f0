"""The pages of an engine that a gateway reads, and OpenAI's model list, which both serve. Both sides use these types.

Engines run tenants' images, so the gateway checks what it reads. It ignores unknown fields, and the engines of other
runtimes, such as vLLM, lack some of these pages and fields.
"""

from typing import Annotated, Final, Literal, TypedDict

from msgspec import Meta, Struct

LOAD_PATH: Final = "/load"
ADAPTERS_PATH: Final = "/adapters"
"""What the engine has made of each adapter that may come and go: `AdapterStates`."""
STEPS_PATH: Final = "/steps"
"""What the engine's last MAX_STEPS steps were: `Steps`."""
MAX_STEPS: Final = 200
PLACE_PATH: Final = "/place"
"""GET reserves a place for a gateway's next request, and DELETE releases it."""
USAGE_PATH: Final = "/usage"
"""`GET /usage?key=`, with the key that the gateway sent in the request."""


class AdapterState(Struct, frozen=True):
    """What an engine has made of an adapter that may come and go."""

    directory: Annotated[str, Meta(max_length=1024)]
    """Where the adapter of the list is, which tells two adapters of one name apart."""
    state: Literal["Loading", "Ready", "Failed"]
    reason: Annotated[str, Meta(pattern="^[A-Za-z]{0,64}$")] = ""
    message: Annotated[str, Meta(max_length=1000)] = ""
    serves: bool = False
    """Whether it answers requests for it, perhaps with the adapter that an earlier spec had under this name."""


AdapterStates = Annotated[dict[str, AdapterState], Meta(max_length=1000)]
"""By the name of the adapter. An engine with many failed adapters has messages for some of them only."""


class ReportedLoad(Struct, frozen=True):
    """The part of an engine's load that gateways read. A field is None if the engine does not report it."""

    waiting: Annotated[int, Meta(ge=0)] | None = None
    """Requests without a place in its batch."""
    carried: Annotated[int, Meta(ge=1)] | None = None
    """Requests that it can run at once, if its KV cache or its objectives allow fewer than a batch."""
    limit_reason: Annotated[str, Meta(pattern="^[a-z_]{1,32}$")] | None = None
    """The reason for `carried`, if the engine has objectives: see `limit_reasons`."""
    warm_up_seconds: Annotated[float, Meta(ge=0)] | None = None
    """How long the engine warmed up at its start."""


class Load(ReportedLoad, frozen=True, kw_only=True):
    """The engine's load.

    `server_load` is vLLM's name for the number of all requests here. `carried` is how many can run at once, if the KV
    cache or objectives allow fewer than a batch. With objectives, `limit_reason` is the reason and `max_prompt_tokens`
    limits the prompt tokens of a step. `warm_up_seconds` is how long the engine warmed up at its start.
    """

    server_load: int
    running: int
    max_num_seqs: int
    kv_cache_usage: float
    max_prompt_tokens: int | None
    draining: bool


_StepCount = Annotated[int, Meta(ge=0, le=10**9)]


class StepRecord(Struct, frozen=True):
    """One step of an engine."""

    ended: float
    """Unix time in seconds."""
    seconds: Annotated[float, Meta(ge=0, le=1e6)]
    rows: _StepCount
    """Requests that took part."""
    tokens: _StepCount
    """Computed tokens, dummies included."""
    prompt_tokens: _StepCount
    generated_tokens: _StepCount
    padding_share: Annotated[float, Meta(ge=0, le=1)]
    """Share of dummies in the computed tokens, 0 to 1. Where the model pads a batch itself: in the batch's cost."""
    waiting: _StepCount
    """Requests without a place in the batch, after the step."""
    closed_by: Annotated[str, Meta(pattern="^[a-z_]{1,16}$")] | None
    """Why the step's batch closed, if it began with this step; None in mode Continuous."""


Steps = Annotated[list[StepRecord], Meta(max_length=MAX_STEPS)]
"""The oldest first."""


class EngineSteps(Struct, frozen=True):
    """`GET /steps?service=<namespace>/<name>` of a gateway: the last steps of engines, by engine, the oldest first.

    Engines that do not answer are left out, and so are all but the first ones of a service with many.
    """

    engines: dict[str, Steps]


class Model(TypedDict):
    """A model in OpenAI's format, with vLLM's `root`, `parent` and context length.

    `parent` is the id of the model to which an adapter belongs, and None for other models.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(TypedDict):
    """The list with the models and their adapters."""

    object: Literal["list"]
    data: list[Model]
