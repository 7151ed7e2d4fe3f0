"""The settings of a job, as `conveyor_process.settings` reads them. Read once, by `__main__`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from conveyor_jobs.outcome import MaxFailed
from conveyor_process.kinds import LOG_FORMAT, LOG_LEVEL, PATH, WORDS, seconds, whole_number
from conveyor_process.log import LogFormat
from conveyor_process.settings import Program, ValueKind, optional, required, setting

_MONTH_SECONDS: Final = 30 * 86_400.0


def _parse_base(text: str) -> str:
    base = text.rstrip("/").removesuffix("/v1").rstrip("/")
    parts = urlsplit(base)
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", base) or not parts.hostname or parts.port == 0:
        raise ValueError(text)
    return base


def _parse_class(text: str) -> str:
    if not re.fullmatch("[a-z0-9-]{0,63}", text):
        raise ValueError(text)
    return text


def _parse_max_failed(text: str) -> MaxFailed:
    match = re.fullmatch("([0-9]{1,9})(%?)", text)
    if match is None or (match[2] and int(match[1]) > 100):
        raise ValueError(text)
    return MaxFailed(int(match[1]), is_percentage=bool(match[2]))


_BASE: Final = ValueKind("an address http[s]://HOST[:PORT][/PATH] without user, password and query", _parse_base)
_CLASS: Final = ValueKind("the name of a class", _parse_class)
_MAX_FAILED: Final = ValueKind("a number of requests, or a percentage such as 5%", _parse_max_failed)


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting has the flag `--field-name` and the variable CONVEYOR_JOBS_FIELD_NAME."""

    input: str = required(
        "file with one request per line, in the format of OpenAI's Batch API: a path, or an http(s) address", WORDS
    )
    output: Path = required(
        "folder for the results; a job that is started again continues with the results in this folder", PATH
    )
    url: str = required(
        "address of the service, such as `http://conveyor-gateway.conveyor-system/team-a/qwen`, or of the gateway's "
        "root, where the `model` of each request selects the service",
        _BASE,
    )
    request_class: str = setting("", "class of the requests (`queue.classes`); empty: the service's default", _CLASS)
    max_concurrency: int = setting(
        64, "most requests in flight; the job sends fewer while the queue is full", whole_number(1, 4096)
    )
    max_attempts: int = setting(
        3,
        "most attempts of a request that ends in an error of the service or in a broken connection",
        whole_number(1, 100),
    )
    max_failed: MaxFailed | None = setting(
        None,
        "most requests that may fail. If more fail, the job ends with exit code 4 after all results are written; "
        "default: all but one",
        optional(_MAX_FAILED),
    )
    answer_timeout_seconds: float = setting(
        3600.0, "longest wait for one response; the service's `requestTimeout` is usually shorter", seconds(least=1)
    )
    service_timeout_seconds: float = setting(
        300.0,
        "longest wait for a service that does not exist or cannot be reached, until it has responded for the first "
        "time. Then the job ends, because `url` is probably wrong",
        seconds(least=1),
    )
    completion_window_seconds: float = setting(
        86_400.0,
        "time since the job's first start, in which it may also be suspended, after which requests without a response "
        "expire",
        seconds(_MONTH_SECONDS, least=1),
    )
    grace_seconds: float = setting(20.0, "after SIGTERM: time for the requests in flight to end", seconds(3600))
    api_key_file: Path | None = setting(
        None,
        "file with a key, or a token of the pod's ServiceAccount, to send as `Authorization: Bearer`. A new content is "
        "used within seconds",
        optional(PATH),
    )
    log_level: str = setting("INFO", "lowest level that is logged", LOG_LEVEL)
    log_format: LogFormat = setting("logfmt", "format of log lines", LOG_FORMAT)


PROGRAM = Program(
    "conveyor_jobs",
    "Sends the requests of a file to a service, and writes the responses to files.",
    Settings,
)
