"""The operator's settings: flags, or the environment variables named like them.

`--engine-image X` is `CONVEYOR_OPERATOR_ENGINE_IMAGE=X`; a flag wins. Parsed once, by `__main__`, and passed on.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conveyor_api import names

_PREFIX = "CONVEYOR_OPERATOR_"
_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that may differ between two installations. Times in seconds."""

    engine_image: str = "conveyor/engine:dev"
    namespaces: tuple[str, ...] = ()
    """Empty: the whole cluster."""
    system_namespace: str = names.SYSTEM_NAMESPACE
    cluster_domain: str = names.CLUSTER_DOMAIN
    gateway_url: str = ""
    """Where clients reach the gateway, without a trailing slash; empty: its Service."""
    metrics_api: bool = True
    """Whether to look after the metrics server's certificate and APIServices."""
    kubeconfig: str | None = None
    address: str = "0.0.0.0"
    port: int = names.OPERATOR_ADMIN_PORT
    workers: int = 8
    resync_seconds: float = 600.0
    """How often every service is compared with memory anew; makes no calls when nothing is different."""
    log_level: str = "info"

    @property
    def gateway_host(self) -> str:
        return names.gateway_host(self.system_namespace, self.cluster_domain)

    def service_url(self, namespace: str, service: str) -> str:
        """What `status.url` says."""
        base = self.gateway_url or f"http://{self.gateway_host}"
        return base + names.gateway_path(namespace, service)


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Exits with a message and code 2 if a flag or variable is wrong."""
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m conveyor_operator",
        description="Brings InferenceServices about: Deployments, Services, autoscalers and their status.",
        epilog=f"Each flag may also be given as an environment variable, for example {_PREFIX}ENGINE_IMAGE.",
    )

    def add(flag: str, default: object, help: str, **more: object) -> None:
        value = environment.get(_PREFIX + flag.upper().replace("-", "_"), default)
        parser.add_argument(f"--{flag}", default=value, help=f"{help} (default: {default or 'none'})", **more)  # type: ignore[arg-type]

    add("engine-image", defaults.engine_image, "engine image of services that name none")
    add("namespaces", "", "comma-separated namespaces to serve; empty: all")
    add("system-namespace", defaults.system_namespace, "namespace of gateway and metrics server")
    add("cluster-domain", defaults.cluster_domain, "the cluster's DNS domain")
    add("gateway-url", "", "URL of the gateway for status.url; empty: its Service")
    add("metrics-api", "true", "look after the metrics server's certificate", choices=("true", "false"))
    add("kubeconfig", environment.get("KUBECONFIG"), "kubeconfig file; none: the pod's service account")
    add("address", defaults.address, "address of /livez, /readyz and /metrics")
    add("port", defaults.port, "their port; 0: any", type=int)
    add("workers", defaults.workers, "services reconciled at once", type=int)
    add("resync-seconds", defaults.resync_seconds, "how often everything is compared anew", type=float)
    add("log-level", defaults.log_level, "least level of the log", choices=_LEVELS)
    given = parser.parse_args(arguments)
    if given.workers < 1 or given.resync_seconds <= 0 or not 0 <= given.port <= 65535:
        parser.error("--workers must be at least 1, --resync-seconds more than 0, --port between 0 and 65535")
    return Settings(
        engine_image=given.engine_image,
        namespaces=tuple(name.strip() for name in given.namespaces.split(",") if name.strip()),
        system_namespace=given.system_namespace,
        cluster_domain=given.cluster_domain,
        gateway_url=given.gateway_url.rstrip("/"),
        metrics_api=given.metrics_api == "true",
        kubeconfig=given.kubeconfig,
        address=given.address,
        port=given.port,
        workers=given.workers,
        resync_seconds=given.resync_seconds,
        log_level=given.log_level,
    )
