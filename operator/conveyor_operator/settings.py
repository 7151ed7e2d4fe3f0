"""The operator's settings, as `conveyor_process.settings` reads them. Read once, by `__main__`, and passed on."""

import socket
from dataclasses import dataclass
from pathlib import Path

from conveyor_api import names
from conveyor_kube.kubeconfig import KUBECONFIG_MEANING
from conveyor_process.kinds import LOG_FORMAT, LOG_LEVEL, NAMESPACES, PATH, PORT, TEXT, TRUE_OR_FALSE, whole_number
from conveyor_process.log import LogFormat
from conveyor_process.settings import Kind, Program, optional, setting

_URL = Kind("a URL", lambda text: text.rstrip("/"))


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting has the flag `--field-name` and the variable CONVEYOR_OPERATOR_FIELD_NAME."""

    engine_image: str = setting("conveyor/engine:dev", "engine image of services that name none", TEXT)
    user_id: int = setting(
        65532, "user and group of engine pods; 0: none, where the platform gives them one", whole_number(0, 2**31 - 1)
    )
    profiles: Path | None = setting(
        None, "YAML file of what services get that name a profile; default: there are none", optional(PATH)
    )
    watch_namespaces: tuple[str, ...] = setting(
        (), "namespaces whose InferenceServices are served; empty for all", NAMESPACES
    )
    system_namespace: str = setting(names.SYSTEM_NAMESPACE, "namespace of gateway and metrics server", TEXT)
    cluster_domain: str = setting(names.CLUSTER_DOMAIN, "the cluster's DNS domain", TEXT)
    gateway_url: str = setting("", "where clients reach the gateway, for status.url; empty: its Service", _URL)
    leader_elect: bool = setting(
        False, "act only while holding the Lease conveyor-operator of system-namespace; else stand by", TRUE_OR_FALSE
    )
    identity: str = setting("", "name in that Lease; empty: the host's, which in a pod is the pod's", TEXT)
    metrics_api: bool = setting(True, "register custom.metrics.k8s.io and keep its certificate", TRUE_OR_FALSE)
    network_policies: bool = setting(True, "let nobody but the gateways open connections to engines", TRUE_OR_FALSE)
    prometheus_namespaces: tuple[str, ...] = setting(
        (), "namespaces whose pods may read the engines' /metrics as well", NAMESPACES
    )
    kubeconfig: str = setting("", KUBECONFIG_MEANING, TEXT)
    host: str = setting("", "address to listen on; empty for every address", TEXT)
    admin_port: int = setting(names.OPERATOR_ADMIN_PORT, "port of /livez, /readyz and /metrics; 0: any free one", PORT)
    workers: int = setting(
        8, "services reconciled at once, at most half of them in one namespace", whole_number(1, 1000)
    )
    log_level: str = setting("INFO", "least level of the log", LOG_LEVEL)
    log_format: LogFormat = setting("logfmt", "form of each line of the log", LOG_FORMAT)

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
        """What `status.url` says."""
        base = self.gateway_url or f"http://{self.gateway_host}"
        return base + names.gateway_path(namespace, service)


PROGRAM = Program(
    "conveyor_operator",
    "Brings InferenceServices about: Deployments, Services, autoscalers and their status.",
    Settings,
)
