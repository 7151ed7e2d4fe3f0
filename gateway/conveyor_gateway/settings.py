"""The gateway's settings, which `conveyor_process.settings` reads. `__main__` reads them once.

Settings of one service (queue limit, timeouts) are not here, but in its InferenceService.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from conveyor_api.names import GATEWAY_ACCOUNT, GATEWAY_ADMIN_PORT, GATEWAY_PORT, SYSTEM_NAMESPACE
from conveyor_gateway.given_limits import GIVEN_LIMITS, GivenLimits
from conveyor_kube.kubeconfig import KUBECONFIG_MEANING
from conveyor_process.kinds import (
    HEADER,
    HOSTS,
    LOG_FORMAT,
    LOG_LEVEL,
    NAMESPACES,
    NETWORKS,
    ORIGINS,
    PATH,
    PORT,
    TEXT,
    Network,
    literal,
    seconds,
    whole_number,
)
from conveyor_process.log import LogFormat
from conveyor_process.settings import Program, optional, setting

RootModels = Literal["Listed", "All"]
DefaultAccess = Literal["Open", "Required", "Enforced"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting has the flag `--field-name` and the variable CONVEYOR_GATEWAY_FIELD_NAME."""

    host: str = setting("", "address to listen on; empty: all addresses", TEXT)
    port: int = setting(GATEWAY_PORT, "port of the API that clients use; 0: any free port", PORT)
    tls_folder: str = setting(
        "",
        "folder with `tls.crt` and `tls.key`, such as a mounted Secret: the port then serves TLS, and loads new files "
        "within seconds; empty: no TLS",
        TEXT,
    )
    engine_authorities: Path | None = setting(
        None,
        "PEM file with the authorities of the engines' certificates, which must be for NAME-engine.NAMESPACE.svc. The "
        "gateway then connects to all engines by TLS. New files are loaded within seconds. Default: plain HTTP",
        optional(PATH),
    )
    admin_host: str = setting("", "address of the admin port; empty: `host`", TEXT)
    admin_port: int = setting(
        GATEWAY_ADMIN_PORT, "port of /demand, /activity, /start, /receipt, /metrics, /healthz and /readyz", PORT
    )
    kubeconfig: str = setting("", KUBECONFIG_MEANING, TEXT)
    watch_namespaces: tuple[str, ...] = setting(
        (), "namespaces whose InferenceServices are served; empty for all", NAMESPACES
    )
    system_namespace: str = setting(
        SYSTEM_NAMESPACE,
        "namespace of the gateways. It is part of the gateway's own host name. The gateways in this namespace share "
        "the queue limit of each service",
        TEXT,
    )
    service_account: str = setting(
        GATEWAY_ACCOUNT,
        "ServiceAccount of the gateway in system_namespace. Engines that answer only gateways get tokens of it",
        TEXT,
    )
    public_hosts: tuple[str, ...] = setting(
        (),
        "host names of the gateway, for example of an ingress; needed only for names with one or two labels, such as "
        "gateway or gateway.lan. If such a name is not listed, the gateway reads two labels as NAME.NAMESPACE of a "
        "service, and rejects one label with 421",
        HOSTS,
    )
    trusted_proxies: tuple[Network, ...] = setting(
        (),
        "networks of proxies in front of the gateway. For connections from these networks, the client is the last "
        "address in X-Forwarded-For that is not a proxy's. For others, it is the connecting address. The requests and "
        "bytes of each client are limited",
        NETWORKS,
    )
    client_header: str = setting(
        "",
        "header in which the trusted proxies name the client, for example X-Client, after they have checked its key. "
        "The name then replaces the address in shares, in the log, and in the metrics of tokens by client. The proxies "
        "must replace or remove this header of their clients. Empty: no header",
        HEADER,
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "origins of web pages whose scripts may call the gateway (CORS), such as https://chat.example.com; * for all; "
        "empty for none",
        ORIGINS,
    )
    root_models: RootModels = setting(
        "Listed",
        "services that `GET /v1/models` at the root lists. Listed: those with `listed: true`. All: every service, for "
        "a cluster with one team",
        literal(RootModels),
    )
    access: DefaultAccess = setting(
        "Open",
        "who may use services. Open: everyone, except where `access.mode` of a service is Required. Required: callers "
        "with an APIKey or the token of a ServiceAccount, except where `access.mode` is Open. Enforced: the same, "
        "whatever `access.mode` is",
        literal(DefaultAccess),
    )
    limits: GivenLimits | None = setting(
        None,
        "limits of callers by namespace, and by owner as NAMESPACE/OWNER, over all gateways together, in addition to "
        "those of each APIKey. `*` stands for each one that is not listed. The fields are those of `limits` in an "
        "APIKey",
        optional(GIVEN_LIMITS),
    )
    # A connection takes 0.1 MiB with the longest headers. A stream that its client does not read takes 0.25 MiB more.
    # All connections and max_held_bytes together fit in the 1 GiB that the chart allows.
    max_connections: int = setting(
        2048,
        "limit on open client connections. At the limit, a new connection replaces the longest idle ones of the client "
        "with most idle connections. At most 7/8 of the connections carry requests at the same time (1,792 by "
        "default). One namespace gets at most 7/8 of these requests (1,568), even if `queue.maxRequests` is higher. "
        "If the limit on open files is low, fewer connections are allowed",
        whole_number(1, 1_000_000),
    )
    max_request_bytes: int = setting(
        8 * _MIB,
        "longest request body, decompressed. Bodies with audio can always have 26 MiB",
        whole_number(1, 1 << 30),
    )
    max_held_bytes: int = setting(
        128 * _MIB,
        "limit on the bytes of requests and buffered responses in memory. One namespace can use 7/8 of these bytes. "
        "Requests that do not fit get 503",
        whole_number(1, 1 << 40),
    )
    body_timeout_seconds: float = setting(
        60.0, "time limit for the arrival of a request body; after 10 s, the body must average 16 KiB/s", seconds()
    )
    keep_alive_seconds: float = setting(
        620.0,
        "how long an idle connection stays open between two requests. Set it above the idle time-out that a proxy in "
        "front has for its connections to the gateway: 600 s for Google Cloud's load balancers, 60 s for AWS's",
        seconds(least=1),
    )
    heartbeat_seconds: float = setting(
        15.0,
        "interval of empty lines in a stream that waits for an engine or for its first token. They make proxies keep "
        "the connection open. 0: none, so a stream begins with its first event, and errors before it have a status",
        seconds(),
    )
    drain_delay_seconds: float = setting(
        5.0,
        "how long new connections are still accepted after SIGTERM, until clients stop using the address",
        seconds(),
    )
    drain_timeout_seconds: float = setting(
        600.0, "how long queued and running requests may take to finish after drain_delay_seconds", seconds()
    )
    log_level: str = setting("INFO", "lowest level that is logged", LOG_LEVEL)
    log_format: LogFormat = setting("logfmt", "format of log lines", LOG_FORMAT)


def _find_conflicts(settings: Settings) -> Iterator[tuple[str, str]]:
    if settings.max_held_bytes < 2 * settings.max_request_bytes:
        yield (
            "max_held_bytes",
            "is less than twice `max_request_bytes`: two namespaces get half each, so their longest requests could "
            "never be accepted together",
        )
    if settings.client_header and not settings.trusted_proxies:
        yield "client_header", "has no effect without `trusted_proxies`: anybody could write it"


PROGRAM = Program(
    "conveyor_gateway",
    "Accepts the requests for all InferenceServices, queues them, and sends each to an engine with a free place.",
    Settings,
    _find_conflicts,
)
