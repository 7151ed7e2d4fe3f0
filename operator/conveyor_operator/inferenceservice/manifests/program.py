"""The program in an engine's container: Conveyor's own engine. `vllm` has the program for runtime VLLM. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from conveyor_api import names
from conveyor_operator.loop.owner import Object

PRE_STOP_SECONDS = 5  # time for gateways to see that the pod is leaving, before it rejects requests


@dataclass(frozen=True, slots=True)
class EngineProgram:
    """A program with its probes. `pre_stop`: a lifecycle handler. `variables`: defaults that the user can override."""

    command: tuple[str, ...]
    readiness_path: str
    liveness_path: str
    pre_stop: Object
    variables: Mapping[str, str] = field(default_factory=dict)


ENGINE = EngineProgram(
    ("python", "-m", "conveyor_engine", "serve", "--config", names.ENGINE_CONFIG_PATH),
    names.READINESS_PATH,
    names.LIVENESS_PATH,
    {"sleep": {"seconds": PRE_STOP_SECONDS}},
    {"HF_HUB_OFFLINE": "1"},  # the model is already on disk
)
