"""The gateway's settings, as `conveyor_process.settings` reads them. Read once, by `__main__`.

What concerns one service (queue limit, time-outs) is not here: it comes with its InferenceService.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from conveyor_api.names import GATEWAY_ADMIN_PORT, GATEWAY_PORT, SYSTEM_NAMESPACE
from conveyor_kube.kubeconfig import KUBECONFIG_MEANING
from conveyor_process.kinds import (
    HOSTS,
    LOG_FORMAT,
    LOG_LEVEL,
    NAMESPACES,
    NETWORKS,
    ORIGINS,
    PORT,
    TEXT,
    Network,
    literal,
    seconds,
    whole_number,
)
from conveyor_process.log import LogFormat
from conveyor_process.settings import Program, setting

RootModels = Literal["Listed", "All"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting has the flag `--field-name` and the variable CONVEYOR_GATEWAY_FIELD_NAME."""

    host: str = setting("", "address to listen on; empty for every address", TEXT)
    port: int = setting(GATEWAY_PORT, "port of the API that clients use; 0: any free one", PORT)
    admin_port: int = setting(
        GATEWAY_ADMIN_PORT, "port of /demand, /activity, /start, /metrics, /healthz and /readyz", PORT
    )
    kubeconfig: str = setting("", KUBECONFIG_MEANING, TEXT)
    watch_namespaces: tuple[str, ...] = setting(
        (), "namespaces whose InferenceServices are served; empty for all", NAMESPACES
    )
    system_namespace: str = setting(
        SYSTEM_NAMESPACE,
        "namespace of the gateways: the gateway's own host name is no InferenceService, and as many as are found there "
        "share what may wait for a service",
        TEXT,
    )
    public_hosts: tuple[str, ...] = setting(
        (),
        "host names of the gateway (of an ingress, say); needed only for names with one or two parts, which would be "
        "read as NAME.NAMESPACE",
        HOSTS,
    )
    trusted_proxies: tuple[Network, ...] = setting(
        (),
        "networks of proxies in front of the gateway: behind them a client is the last address of X-Forwarded-For that "
        "is not a proxy's, and has its share of the gateway; without them a client is the peer's address",
        NETWORKS,
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "origins of web pages whose scripts may call the gateway (CORS), as https://chat.example.com; * for all; empty "
        "for none",
        ORIGINS,
    )
    root_models: RootModels = setting(
        "Listed",
        "which services `GET /v1/models` of the root shows: those with `listed: true`, or All, where one team has the "
        "cluster",
        literal(RootModels),
    )
    # One takes 0.1 MiB with the longest headers, 0.25 MiB more with a stream that its client does not read: all of them
    # and max_held_bytes fit in the 1 GiB that the chart allows.
    max_connections: int = setting(
        2048,
        "clients' connections at a time; for one more, those that wait longest for their client are closed; seven "
        "eighths of them may have a request, three quarters of these for one service (1,344 by default), whatever its "
        "`queue.maxRequests` is; fewer if the process may open too few files",
        whole_number(1, 1_000_000),
    )
    max_request_bytes: int = setting(
        8 * _MIB,
        "longest request body; where only its model names the service, 1 MiB at most",
        whole_number(1, 1 << 30),
    )
    max_held_bytes: int = setting(
        128 * _MIB,
        "bytes of requests and collected answers that are kept in memory at a time, at most half of them for one "
        "service and seven eighths for one client; beyond it, 503",
        whole_number(1, 1 << 40),
    )
    body_timeout_seconds: float = setting(
        60.0, "how long a request body may take to arrive; after 10 s it must have come at 16 KiB/s", seconds()
    )
    heartbeat_seconds: float = setting(
        15.0,
        "how often a stream whose request waits for a service that may be at zero gets a comment, so that proxies keep "
        "its connection",
        seconds(least=0.01),
    )
    drain_delay_seconds: float = setting(
        5.0, "after SIGTERM: how long new connections are still taken, until no one knows the address", seconds()
    )
    drain_timeout_seconds: float = setting(
        600.0, "after that: how long requests that are queued or running may take to end", seconds()
    )
    log_level: str = setting("INFO", "least level of the log", LOG_LEVEL)
    log_format: LogFormat = setting("logfmt", "form of each line of the log", LOG_FORMAT)


def _find_conflicts(settings: Settings) -> Iterator[tuple[str, str]]:
    if settings.max_held_bytes < 2 * settings.max_request_bytes:
        yield (
            "max_held_bytes",
            "is below twice `max_request_bytes`: one service may have half, and its longest request could never be "
            "taken",
        )


PROGRAM = Program(
    "conveyor_gateway",
    "The door of all InferenceServices: queues requests and passes them to the least loaded engine.",
    Settings,
    _find_conflicts,
)
