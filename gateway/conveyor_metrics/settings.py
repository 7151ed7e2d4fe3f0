"""How the server is told what to do: flags, then environment variables, then defaults. Read once, by `__main__`."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from conveyor_api.names import GATEWAY_ADMIN_SERVICE, METRICS_ADMIN_PORT, METRICS_PORT, SYSTEM_NAMESPACE
from conveyor_gateway.errors import SettingsError

ENVIRONMENT_PREFIX = "CONVEYOR_METRICS_"


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting has the flag `--field-name` and the variable CONVEYOR_METRICS_FIELD_NAME."""

    namespace: str = SYSTEM_NAMESPACE
    gateway_service: str = GATEWAY_ADMIN_SERVICE
    gateway_timeout_seconds: float = 1.0
    certificate_folder: Path = Path("/etc/conveyor/tls")
    host: str = ""
    https_port: int = METRICS_PORT
    health_port: int = METRICS_ADMIN_PORT
    kubeconfig: str = ""
    log_level: str = "INFO"


_HELP = {
    "namespace": "namespace of the gateways",
    "gateway_service": "headless Service whose EndpointSlices name the gateways' admin ports",
    "gateway_timeout_seconds": "how long all gateways together may take to answer",
    "certificate_folder": "folder with tls.crt and tls.key; waited for, and read again when they change",
    "host": "address to listen on; empty for every address",
    "https_port": "port of the custom.metrics.k8s.io API",
    "health_port": "plain port of /livez, /readyz and /metrics",
    "kubeconfig": "kubeconfig file; empty for the pod's ServiceAccount",
    "log_level": "DEBUG, INFO, WARNING or ERROR",
}


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Raises SettingsError; `--help` and unknown flags end the process, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m conveyor_metrics",
        allow_abbrev=False,
        description="Serve custom.metrics.k8s.io for InferenceServices, by asking the gateways at query time.",
    )
    known = {ENVIRONMENT_PREFIX + field.name.upper() for field in fields(Settings)}
    unknown = sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in known)
    if unknown:
        raise SettingsError(f"unknown environment variable {unknown[0]}; the known ones are in --help")
    for field in fields(Settings):
        variable = ENVIRONMENT_PREFIX + field.name.upper()
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=environment.get(variable, str(field.default)),
            help=f"{_HELP[field.name]} (default {str(field.default)!r}; ${variable})",
        )
    return _check(vars(parser.parse_args(arguments)))


def _check(values: Mapping[str, str]) -> Settings:
    level = values["log_level"].upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise SettingsError(f"log_level is {level!r}: it must be DEBUG, INFO, WARNING or ERROR")
    return Settings(
        namespace=values["namespace"],
        gateway_service=values["gateway_service"],
        gateway_timeout_seconds=_seconds("gateway_timeout_seconds", values),
        certificate_folder=Path(values["certificate_folder"]),
        host=values["host"],
        https_port=_port("https_port", values),
        health_port=_port("health_port", values),
        kubeconfig=values["kubeconfig"],
        log_level=level,
    )


def _seconds(name: str, values: Mapping[str, str]) -> float:
    try:
        seconds = float(values[name])
    except ValueError:
        seconds = 0.0
    # The API server gives up after 30 s, so the largest useful value is below that.
    if not 0 < seconds <= 20:
        raise SettingsError(f"{name} is {values[name]!r}: it must be a number of seconds above 0, up to 20")
    return seconds


def _port(name: str, values: Mapping[str, str]) -> int:
    if not values[name].isdecimal() or not int(values[name]) < 65536:
        raise SettingsError(f"{name} is {values[name]!r}: it must be a port number, 0 to 65535 (0: any free one)")
    return int(values[name])
