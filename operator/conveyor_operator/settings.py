"""The operator's settings, as `conveyor_process.settings` reads them. Read once, by `__main__`, and passed on."""

import socket
from dataclasses import dataclass
from pathlib import Path

from conveyor_api import names
from conveyor_kube.kubeconfig import KUBECONFIG_MEANING
from conveyor_process.kinds import (
    LOG_FORMAT,
    LOG_LEVEL,
    NAMESPACES,
    PATH,
    PORT,
    TEXT,
    TRUE_OR_FALSE,
    seconds,
    whole_number,
)
from conveyor_process.log import LogFormat
from conveyor_process.settings import Program, ValueKind, optional, setting

_URL = ValueKind("a URL", lambda text: text.rstrip("/"))


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting has the flag `--field-name` and the variable CONVEYOR_OPERATOR_FIELD_NAME."""

    engine_image: str = setting("conveyor/engine:dev", "engine image for services without engine.image", TEXT)
    user_id: int = setting(
        65532, "user and group ID of engine pods; 0: none, for platforms that assign one", whole_number(0, 2**31 - 1)
    )
    pod_ip: str = setting(
        "", "address of this pod; vLLM listens on its family. Empty: IPv4 (Conveyor's engines listen on both)", TEXT
    )
    profiles: Path | None = setting(
        None, "YAML file of the profiles that services can name; default: no profiles", optional(PATH)
    )
    watch_namespaces: tuple[str, ...] = setting(
        (), "namespaces whose InferenceServices are served; empty for all", NAMESPACES
    )
    system_namespace: str = setting(names.SYSTEM_NAMESPACE, "namespace of gateway and metrics server", TEXT)
    cluster_domain: str = setting(names.CLUSTER_DOMAIN, "the cluster's DNS domain", TEXT)
    gateway_url: str = setting("", "base URL of the gateway in status.url; empty: the gateway's Service", _URL)
    engine_tls_secret: str = setting(
        "",
        "name of a Secret with tls.crt and tls.key in the namespace of each service; engines then serve TLS. Empty: "
        "plain HTTP",
        TEXT,
    )
    gateway_account: str = setting(
        "",
        "ServiceAccount of the gateways in system-namespace; Conveyor's engines then answer only its tokens, and those "
        "of the ServiceAccount of their own service. Empty: engines answer everyone",
        TEXT,
    )
    unserved_name_seconds: float = setting(
        7 * 86400.0,
        "life of a ServedName whose services were never Ready; then another namespace may have the name. 0: no limit",
        seconds(366 * 86400.0),
    )
    leader_elect: bool = setting(
        False,
        "reconcile only while holding the Lease conveyor-operator in system-namespace",
        TRUE_OR_FALSE,
    )
    identity: str = setting(
        "", "name of this operator in the Lease; empty: the host name (in a pod, the pod's name)", TEXT
    )
    metrics_api: bool = setting(
        True, "register custom.metrics.k8s.io, and issue and rotate its certificate", TRUE_OR_FALSE
    )
    network_policies: bool = setting(
        True, "create NetworkPolicies that let only gateways connect to engines", TRUE_OR_FALSE
    )
    prometheus_namespaces: tuple[str, ...] = setting(
        (), "namespaces whose pods may also connect to engines, to read /metrics", NAMESPACES
    )
    kubeconfig: str = setting("", KUBECONFIG_MEANING, TEXT)
    host: str = setting("", "address to listen on; empty: all addresses", TEXT)
    admin_port: int = setting(names.OPERATOR_ADMIN_PORT, "port of /livez, /readyz and /metrics; 0: any free port", PORT)
    workers: int = setting(
        8, "services reconciled at once; one namespace can use half of the workers", whole_number(1, 1000)
    )
    api_calls_per_second: int = setting(
        500,
        "average number of calls to the API server per second; after a pause, a burst may have this number of calls",
        whole_number(1),
    )
    log_level: str = setting("INFO", "lowest level that is logged", LOG_LEVEL)
    log_format: LogFormat = setting("logfmt", "format of log lines", LOG_FORMAT)

    @property
    def has_ipv6(self) -> bool:
        """Return whether the cluster's pods have IPv6 addresses first."""
        return ":" in self.pod_ip

    @property
    def lease_identity(self) -> str:
        return self.identity or socket.gethostname()

    @property
    def gateway_host(self) -> str:
        return names.gateway_host(self.system_namespace, self.cluster_domain)

    @property
    def metrics_url(self) -> str:
        return names.metrics_url(self.system_namespace, self.cluster_domain)

    def service_url(self, namespace: str, service: str) -> str:
        """Return the service's address for `status.url`."""
        base = self.gateway_url or f"http://{self.gateway_host}"
        return base + names.gateway_path(namespace, service)


PROGRAM = Program(
    "conveyor_operator",
    "Creates and maintains Deployments, Services and autoscalers for InferenceServices, and reports status.",
    Settings,
)
