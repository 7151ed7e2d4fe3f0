"""The gateway's settings, which `conveyor_process.settings` reads. `__main__` reads them once.

Settings of one service (queue limit, timeouts) are not here, but in its InferenceService.
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

    host: str = setting("", "address to listen on; empty: all addresses", TEXT)
    port: int = setting(GATEWAY_PORT, "port of the API that clients use; 0: any free port", PORT)
    admin_port: int = setting(
        GATEWAY_ADMIN_PORT, "port of /demand, /activity, /start, /metrics, /healthz and /readyz", PORT
    )
    kubeconfig: str = setting("", KUBECONFIG_MEANING, TEXT)
    watch_namespaces: tuple[str, ...] = setting(
        (), "namespaces whose InferenceServices are served; empty for all", NAMESPACES
    )
    system_namespace: str = setting(
        SYSTEM_NAMESPACE,
        "namespace of the gateways. It is part of the gateway's own host name, and the gateways found in it share each "
        "service's queue limit",
        TEXT,
    )
    public_hosts: tuple[str, ...] = setting(
        (),
        "host names of the gateway, for example of an ingress; needed only for names with one or two parts. A name of "
        "two parts that is not listed is read as NAME.NAMESPACE, one of one part gets 421",
        HOSTS,
    )
    trusted_proxies: tuple[Network, ...] = setting(
        (),
        "networks of proxies in front of the gateway. For a connection from them, the client is the last address in "
        "X-Forwarded-For that is not a proxy's; otherwise it is the connecting address. The requests and bytes of "
        "each client are limited",
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
        "services that `GET /v1/models` at the root lists. Listed: those with `listed: true`. All: every service, for "
        "a cluster with one team",
        literal(RootModels),
    )
    # A connection takes 0.1 MiB with the longest headers. A stream that its client does not read takes 0.25 MiB more.
    # All connections and max_held_bytes together fit in the 1 GiB that the chart allows.
    max_connections: int = setting(
        2048,
        "open client connections. At the limit, a new connection closes those that have been idle longest. Seven "
        "eighths may carry a request; three quarters of these may be for one service (1,344 by default), whatever its "
        "`queue.maxRequests`. A low limit of open files lowers the number",
        whole_number(1, 1_000_000),
    )
    max_request_bytes: int = setting(
        8 * _MIB,
        "longest request body. At the root, where the body's model selects the service, the limit is 1 MiB. Audio "
        "files may have 26 MiB in any case",
        whole_number(1, 1 << 30),
    )
    max_held_bytes: int = setting(
        128 * _MIB,
        "bytes of requests and buffered responses in memory, at most half for one service and seven eighths for one "
        "client. Requests beyond it get 503",
        whole_number(1, 1 << 40),
    )
    body_timeout_seconds: float = setting(
        60.0, "how long a request body may take to arrive; after 10 s it must average 16 KiB/s", seconds()
    )
    heartbeat_seconds: float = setting(
        15.0,
        "interval of comments in a stream whose service may be starting from zero, so that proxies keep the "
        "connection open",
        seconds(least=0.01),
    )
    drain_delay_seconds: float = setting(
        5.0,
        "after SIGTERM: how long new connections are still accepted, until clients stop using the address",
        seconds(),
    )
    drain_timeout_seconds: float = setting(
        600.0, "after drain_delay_seconds: how long queued and running requests may take to finish", seconds()
    )
    log_level: str = setting("INFO", "lowest level that is logged", LOG_LEVEL)
    log_format: LogFormat = setting("logfmt", "format of log lines", LOG_FORMAT)


def _find_conflicts(settings: Settings) -> Iterator[tuple[str, str]]:
    if settings.max_held_bytes < 2 * settings.max_request_bytes:
        yield (
            "max_held_bytes",
            "is less than twice `max_request_bytes`: one service gets at most half, so its longest request could never "
            "be accepted",
        )


PROGRAM = Program(
    "conveyor_gateway",
    "The entry point of all InferenceServices: queues requests and sends each to the least loaded engine.",
    Settings,
    _find_conflicts,
)
