"""The console's settings, as `conveyor_process.settings` reads them. Read once, by `__main__`."""

from dataclasses import dataclass
from pathlib import Path

from conveyor_api.names import CONSOLE_PORT, SYSTEM_NAMESPACE
from conveyor_kube.kubeconfig import KUBECONFIG_MEANING
from conveyor_process.kinds import LOG_FORMAT, LOG_LEVEL, NAMESPACES, PATH, PORT, TEXT, seconds
from conveyor_process.log import LogFormat
from conveyor_process.settings import Program, optional, setting


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting has the flag `--field-name` and the variable CONVEYOR_CONSOLE_FIELD_NAME."""

    host: str = setting("", "address to listen on; empty: all addresses", TEXT)
    port: int = setting(CONSOLE_PORT, "port of the pages, /livez and /readyz; 0: any free port", PORT)
    system_namespace: str = setting(SYSTEM_NAMESPACE, "namespace of the gateways", TEXT)
    watch_namespaces: tuple[str, ...] = setting(
        (), "namespaces whose InferenceServices are shown; empty for all", NAMESPACES
    )
    playground_url: str = setting(
        "",
        "base URL of the gateways, to which the page for trying services sends requests; empty: there is no such page",
        TEXT,
    )
    playground_authorities: Path | None = setting(
        None,
        "file with the authorities that verify an https:// playground-url; missing or not set: those of the system",
        optional(PATH),
    )
    read_seconds: float = setting(5.0, "time between two reads of the gateways", seconds(60, least=0.1))
    prometheus_url: str = setting(
        "", "Prometheus with the metrics of Conveyor, for time lines of up to 7 days; empty: none", TEXT
    )
    kubeconfig: str = setting("", KUBECONFIG_MEANING, TEXT)
    log_level: str = setting("INFO", "lowest level that is logged", LOG_LEVEL)
    log_format: LogFormat = setting("logfmt", "format of log lines", LOG_FORMAT)


PROGRAM = Program(
    "conveyor_console",
    "Serves web pages that show the state of InferenceServices, with the caller's rights in Kubernetes.",
    Settings,
)
