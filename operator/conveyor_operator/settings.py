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
    admin_address: str = "0.0.0.0"
    admin_port: int = names.OPERATOR_ADMIN_PORT
    workers: int = 8
    resync_seconds: float = 600.0
    """How often every service is compared anew; costs one list of names per kind."""
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
    parser = build_parser()
    flags = [action.option_strings[0] for action in parser._actions if action.dest != "help"]
    flag_of = {variable_of(flag): flag for flag in flags}
    ours = {variable: value for variable, value in environment.items() if variable.startswith(_PREFIX)}
    if unknown := sorted(ours.keys() - flag_of.keys()):
        parser.error(f"unknown environment variable {unknown[0]}")
    given_by_environment = [f"{flag_of[variable]}={value}" for variable, value in ours.items()]
    given = parser.parse_args([*given_by_environment, *arguments])
    if given.workers < 1 or given.resync_seconds <= 0 or not 0 <= given.admin_port <= 65535:
        parser.error("--workers must be at least 1, --resync-seconds more than 0, --admin-port between 0 and 65535")
    return Settings(
        engine_image=given.engine_image,
        namespaces=tuple(name.strip() for name in given.namespaces.split(",") if name.strip()),
        system_namespace=given.system_namespace,
        cluster_domain=given.cluster_domain,
        gateway_url=given.gateway_url.rstrip("/"),
        metrics_api=given.metrics_api == "true",
        kubeconfig=given.kubeconfig or environment.get("KUBECONFIG") or None,
        admin_address=given.admin_address,
        admin_port=given.admin_port,
        workers=given.workers,
        resync_seconds=given.resync_seconds,
        log_level=given.log_level,
    )


def variable_of(flag: str) -> str:
    """The environment variable that stands for `--some-flag`."""
    return _PREFIX + flag.removeprefix("--").upper().replace("-", "_")


def build_parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m conveyor_operator",
        description="Brings InferenceServices about: Deployments, Services, autoscalers and their status.",
        epilog=f"Each flag may also be given as an environment variable, for example {variable_of('--engine-image')}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--engine-image", default=defaults.engine_image, help="engine image of services that name none")
    add("--namespaces", default="", help="namespaces to serve, with commas between them; empty: all")
    add("--system-namespace", default=defaults.system_namespace, help="namespace of gateway and metrics server")
    add("--cluster-domain", default=defaults.cluster_domain, help="the cluster's DNS domain")
    add("--gateway-url", default="", help="URL of the gateway for status.url; empty: that of its Service")
    add("--metrics-api", default="true", choices=("true", "false"), help="look after the metrics server's certificate")
    add("--kubeconfig", help="kubeconfig file, as KUBECONFIG; none: the pod's service account")
    add("--admin-address", default=defaults.admin_address, help="address of /livez, /readyz and /metrics")
    add("--admin-port", default=defaults.admin_port, type=int, help="their port; 0: any")
    add("--workers", default=defaults.workers, type=int, help="services reconciled at once")
    add("--resync-seconds", default=defaults.resync_seconds, type=float, help="how often all is compared anew")
    add("--log-level", default=defaults.log_level, choices=_LEVELS, help="least level of the log")
    return parser
