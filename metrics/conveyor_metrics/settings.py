"""The metrics server's settings, as `conveyor_process.settings` reads them. Read once, by `__main__`."""

from dataclasses import dataclass
from pathlib import Path

from conveyor_api.names import METRICS_ADMIN_PORT, METRICS_PORT, SYSTEM_NAMESPACE
from conveyor_kube.kubeconfig import KUBECONFIG_MEANING
from conveyor_process.kinds import LOG_FORMAT, LOG_LEVEL, PATH, PORT, TEXT, seconds
from conveyor_process.log import LogFormat
from conveyor_process.settings import Program, setting


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting has the flag `--field-name` and the variable CONVEYOR_METRICS_FIELD_NAME."""

    system_namespace: str = setting(SYSTEM_NAMESPACE, "namespace of the gateways", TEXT)
    # The API server gives up after 30 s, so the largest useful value is below that.
    gateway_timeout_seconds: float = setting(1.0, "time limit for a query of all gateways", seconds(20, least=0.001))
    certificate_folder: Path = setting(
        Path("/etc/conveyor/tls"),
        "folder with tls.crt and tls.key; the server waits for these files, and reloads them when they change",
        PATH,
    )
    host: str = setting("", "address to listen on; empty: all addresses", TEXT)
    https_port: int = setting(METRICS_PORT, "port of the custom.metrics.k8s.io API; 0: any free port", PORT)
    admin_port: int = setting(METRICS_ADMIN_PORT, "plain HTTP port of /livez, /readyz, /metrics and /demand", PORT)
    kubeconfig: str = setting("", KUBECONFIG_MEANING, TEXT)
    log_level: str = setting("INFO", "lowest level that is logged", LOG_LEVEL)
    log_format: LogFormat = setting("logfmt", "format of log lines", LOG_FORMAT)


PROGRAM = Program(
    "conveyor_metrics",
    "Serves custom.metrics.k8s.io for InferenceServices. It queries the gateways for each request.",
    Settings,
)
