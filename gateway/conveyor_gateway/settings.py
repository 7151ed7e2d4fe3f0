"""How the gateway is told what to do: flags, then environment variables, then defaults. Read once, by `__main__`.

What concerns one service (queue limit, time-outs) is not here: it comes with its InferenceService.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from conveyor_api.names import GATEWAY_ADMIN_PORT, GATEWAY_PORT, SYSTEM_NAMESPACE
from conveyor_gateway.errors import SettingsError

ENVIRONMENT_PREFIX = "CONVEYOR_GATEWAY_"

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting has the flag `--field-name` and the variable CONVEYOR_GATEWAY_FIELD_NAME."""

    host: str = ""
    port: int = GATEWAY_PORT
    admin_port: int = GATEWAY_ADMIN_PORT
    kubeconfig: str = ""
    watch_namespaces: tuple[str, ...] = ()
    system_namespace: str = SYSTEM_NAMESPACE
    public_hosts: tuple[str, ...] = ()
    # One takes 0.1 MiB with the longest headers, 0.25 MiB more with a stream that its client does not read: all of them
    # and max_held_bytes fit in the 1 GiB that the chart allows.
    max_connections: int = 2048
    max_request_bytes: int = 8 * _MIB
    max_held_bytes: int = 256 * _MIB
    body_timeout_seconds: float = 60.0
    drain_delay_seconds: float = 5.0
    drain_timeout_seconds: float = 600.0
    stale_after_seconds: float = 150.0
    log_level: str = "INFO"


_HELP = {
    "host": "address to listen on; empty for every address",
    "port": "port of the API that clients use",
    "admin_port": "port of /demand, /metrics, /healthz and /readyz",
    "kubeconfig": "kubeconfig file; empty for the pod's ServiceAccount",
    "watch_namespaces": "namespaces whose InferenceServices are served, with commas between; empty for all",
    "system_namespace": "namespace that the gateway itself runs in: the gateway's own host name is no InferenceService",
    "public_hosts": "host names of the gateway (of an ingress, say), with commas between; needed only for names with "
    "one or two parts, which would be read as <name>.<namespace>",
    "max_connections": "clients' connections at a time; one more is answered 503",
    "max_request_bytes": "longest request body; where only its model names the service, 1 MiB at most",
    "max_held_bytes": "bytes of requests and collected answers that are kept in memory at a time, at most half of them "
    "for one service; beyond it, 503",
    "body_timeout_seconds": "how long a request body may take to arrive",
    "drain_delay_seconds": "after SIGTERM: how long new connections are still taken, until no one knows the address",
    "drain_timeout_seconds": "after that: how long requests that are queued or running may take to end",
    "stale_after_seconds": "silence of the API server after which /readyz says so (it sends a bookmark every minute)",
    "log_level": "DEBUG, INFO, WARNING or ERROR",
}


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Raises SettingsError; `--help` and unknown flags end the process, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m conveyor_gateway",
        allow_abbrev=False,
        description="The door of all InferenceServices: queues requests and passes them to the least loaded engine.",
    )
    known = {ENVIRONMENT_PREFIX + field.name.upper() for field in fields(Settings)}
    unknown = sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in known)
    if unknown:
        raise SettingsError(f"unknown environment variable {unknown[0]}; the known ones are in --help")
    for field in fields(Settings):
        variable = ENVIRONMENT_PREFIX + field.name.upper()
        default = ",".join(field.default) if isinstance(field.default, tuple) else str(field.default)
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=environment.get(variable, default),
            help=f"{_HELP[field.name]} (default {default!r}; ${variable})",
        )
    return _check(vars(parser.parse_args(arguments)))


def _check(values: Mapping[str, str]) -> Settings:
    level = values["log_level"].upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise SettingsError(f"log_level is {level!r}: it must be DEBUG, INFO, WARNING or ERROR")
    settings = Settings(
        host=values["host"],
        port=_integer("port", values, 0, 65535),
        admin_port=_integer("admin_port", values, 0, 65535),
        kubeconfig=values["kubeconfig"],
        watch_namespaces=_list("watch_namespaces", values, r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"),
        system_namespace=values["system_namespace"],
        public_hosts=_list("public_hosts", values, r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"),
        max_connections=_integer("max_connections", values, 1, 1_000_000),
        max_request_bytes=_integer("max_request_bytes", values, 1, 1 << 30),
        max_held_bytes=_integer("max_held_bytes", values, 1, 1 << 40),
        body_timeout_seconds=_seconds("body_timeout_seconds", values),
        drain_delay_seconds=_seconds("drain_delay_seconds", values),
        drain_timeout_seconds=_seconds("drain_timeout_seconds", values),
        stale_after_seconds=_seconds("stale_after_seconds", values),
        log_level=level,
    )
    if settings.max_held_bytes < 2 * settings.max_request_bytes:
        raise SettingsError(
            "max_held_bytes is below twice max_request_bytes: one service may have half, "
            "and its longest request could never be taken"
        )
    return settings


def _integer(name: str, values: Mapping[str, str], least: int, most: int) -> int:
    if not re.fullmatch("[0-9]{1,15}", values[name]) or not least <= int(values[name]) <= most:
        raise SettingsError(f"{name} is {values[name]!r}: it must be a whole number from {least} to {most}")
    return int(values[name])


def _seconds(name: str, values: Mapping[str, str]) -> float:
    try:
        seconds = float(values[name])
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:
        raise SettingsError(f"{name} is {values[name]!r}: it must be a number of seconds from 0 to 86400")
    return seconds


def _list(name: str, values: Mapping[str, str], pattern: str) -> tuple[str, ...]:
    entries = tuple(entry.strip().lower() for entry in values[name].split(",") if entry.strip())
    for entry in entries:
        if not re.fullmatch(pattern, entry):
            raise SettingsError(f"{name} has {entry!r}: it must be a list of DNS names with commas between")
    return entries
