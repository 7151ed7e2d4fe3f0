"""The log of every program on standard error: one line for each event, as logfmt or JSON, with the same keys.

    logger.info("event=request id=%s seconds=%.3f", request_id, seconds)

Our own messages are literal templates of `key=value` pairs that begin with `event=`. Arguments are values and are
quoted here, so that data from a client cannot end a line, begin another key or control a terminal. In JSON, a key is a
number if its place in the template is `%d`, `%f` or `%g`, or if the template has a literal number, and otherwise text.
None is a value that is not known: `-` in logfmt, and no key in JSON. Lines about a request end with its trace's id.

Messages of libraries, such as Kopf and uvicorn, get `event=log`, the logger's name, and the text as one value.
`running` and the engine's `logs` call `set_up_log`.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, TextIO

from conveyor_process.tracing import find_trace_id

LogFormat = Literal["logfmt", "json"]

_URL: Final = re.compile(r"(https?://)(?:[^\s/'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", re.IGNORECASE)
_PAIR: Final = re.compile(r'([a-z][a-z0-9_]*)=("(?:[^"\\]|\\.)*"|[^\s"]*)(?: |$)')
_ARGUMENT: Final = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?([a-zA-Z])")
_NUMBERS: Final = "dfg"
_OWN_LOGGERS: Final = (
    "conveyor_console", "conveyor_engine", "conveyor_gateway", "conveyor_jobs", "conveyor_kube", "conveyor_metrics",
    "conveyor_operator", "conveyor_process",
)  # fmt: skip
_LIBRARY_WARNINGS_MAX: Final = 20  # warnings of one logger in a minute
_BARE: Final = re.compile('[^ "=]+')
_PLAIN_VALUE: Final = re.compile(r"%(?:\.\d+)?[dfgs]|[\w.:/-]+", re.ASCII)
_PLAIN_TYPES: Final = frozenset((str, int, float, type(None)))
_LITERAL_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?", re.ASCII)  # as in JSON
_UNKNOWN: Final = "-"

Value = tuple[str, str | None, bool]
"""A key, its value as text or None if it is not known, and whether the value is a number."""


def set_up_log(level: str, log_format: LogFormat, quiet: tuple[str, ...] = (), stream: TextIO | None = None) -> None:
    """Set up logging for the whole process. `quiet`: loggers of libraries that log too much below WARNING.

    stream: where the lines go; default: standard error.

    DEBUG applies only to our own loggers, because libraries log whole bodies at DEBUG, including bodies of Secrets.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(_LibraryLimit())
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _LogfmtFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    # Log lines omit these facts, which take time to collect (docs.python.org/3/howto/logging.html#optimization).
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # the place of a call in the source
    own_level = logging.getLogger().level
    logging.getLogger().setLevel(max(own_level, logging.INFO))
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(own_level)
    for name in quiet:
        logging.getLogger(name).setLevel(logging.WARNING)


class _LibraryLimit(logging.Filter):
    """Passes a few warnings a minute from each library's logger.

    The first warning after such a minute has the number of warnings that were left out. Kopf, for example, logs nine
    attempts for each of its watches while the API server is unreachable.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, _Logged] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        if record.levelno < logging.WARNING or record.name.partition(".")[0] in _OWN_LOGGERS:
            return True
        logged, now = self._logged.setdefault(record.name, _Logged()), time.monotonic()
        if now - logged.since >= 60:
            left_out, logged.since, logged.count = max(0, logged.count - _LIBRARY_WARNINGS_MAX), now, 0
            if left_out:
                record.msg, record.args = f"{_fill(record)} ({left_out} more in the minute before)", ()
        logged.count += 1
        return logged.count <= _LIBRARY_WARNINGS_MAX


@dataclass(slots=True)
class _Logged:
    """The warnings of one logger since a time of `time.monotonic`."""

    since: float = -60.0
    count: int = 0


def without_secrets(text: str) -> str:
    """Return the text with the user, password and query removed from URLs. A query may contain a signature."""
    return _URL.sub(r"\1\2", text)


def quote(text: str) -> str:
    """Return a value for use after `key=`: unquoted if it is one plain word, otherwise a JSON string."""
    if _BARE.fullmatch(text) and text.isprintable():
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


@lru_cache(1)
def _format_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


class _Formatter(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return f"{_format_second(int(record.created))}.{int(record.msecs):03d}Z"

    def read_values(self, record: logging.LogRecord) -> Iterator[Value]:
        yield "time", self.formatTime(record), False
        yield "level", record.levelname, False
        own = _read_template(record)
        if own is not None:
            yield from own
        else:
            yield "event", "log", False
            yield "logger", record.name, False
            yield "message", without_secrets(_fill(record)), False
        if trace_id := find_trace_id():
            yield "trace_id", trace_id, False
        if record.exc_info:
            yield "traceback", without_secrets(self.formatException(record.exc_info)), False


class _LogfmtFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if (line := _fill_plain(record)) is not None:
            trace_id = find_trace_id()
            trace = f" trace_id={trace_id}" if trace_id else ""
            return f"time={self.formatTime(record)} level={record.levelname} {line}{trace}"
        return " ".join([f"{key}={_write(text, is_number)}" for key, text, is_number in self.read_values(record)])


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        values = {key: _number(text) if is_number else text for key, text, is_number in self.read_values(record)}
        return json.dumps({key: value for key, value in values.items() if value is not None})


def _write(text: str | None, is_number: bool) -> str:
    if text is None:
        return _UNKNOWN
    return text if is_number else quote(text)


def _number(text: str | None) -> float | None:
    try:
        value: float | None = None if text is None else json.loads(text)
    except ValueError:
        return None  # nan or inf
    return value


def _fill_plain(record: logging.LogRecord) -> str | None:
    """Return one of our own messages whose values all need no quotes; otherwise None.

    Most lines are such. Checking all values together takes a third of the time of `_Formatter.read_values`.
    """
    template, arguments = record.msg, record.args
    if (
        record.exc_info
        or not arguments
        or not isinstance(arguments, tuple)
        or not _PLAIN_TYPES.issuperset(map(type, arguments))
    ):
        return None
    if None in arguments:
        template = _omit(template, tuple(number for number, argument in enumerate(arguments) if argument is None))
        arguments = tuple(argument for argument in arguments if argument is not None)
    texts = [argument for argument in arguments if type(argument) is str]
    joined = "".join(texts)
    if "" in texts or not joined.isprintable() or (joined and not _BARE.fullmatch(joined)) or not _is_plain(template):
        return None
    try:
        return template % arguments
    except (TypeError, ValueError):  # the arguments do not fit the template
        return None


@lru_cache(1024)
def _omit(template: str, unknown: tuple[int, ...]) -> str:
    """Return the template with `-` in the place of the arguments with these numbers."""
    places = list(_ARGUMENT.finditer(template))
    for number in reversed(unknown):
        begin, end = places[number].span() if number < len(places) else (0, 0)
        template = template[:begin] + _UNKNOWN + template[end:]
    return template


@lru_cache(1024)
def _is_plain(template: str) -> bool:
    """Return whether each value of the template is one word or one argument."""
    places = _find_places(template)
    return places is not None and all(_PLAIN_VALUE.fullmatch(place.text) for place in places)


def _fill(record: logging.LogRecord) -> str:
    """Return the message; without its arguments if they do not fit, because a lost line is worse."""
    try:
        return record.getMessage()
    except (TypeError, ValueError, LookupError):
        return str(record.msg)


def _read_template(record: logging.LogRecord) -> list[Value] | None:
    """Return the keys and values of one of our own messages; None for a library's message."""
    places = _find_places(record.msg) if isinstance(record.msg, str) else None
    if places is None:
        return None
    arguments = record.args if isinstance(record.args, tuple) else ()
    if not arguments:  # without arguments a `%` is an ordinary character
        return [(place.key, place.text, place.is_literal_number) for place in places]
    try:
        values = [place.fill(arguments) for place in places]
    except (IndexError, TypeError, ValueError):  # the arguments do not fit the template
        return None
    return values if places[-1].first + len(places[-1].kinds) == len(arguments) else None


@dataclass(frozen=True, slots=True)
class _Place:
    """A key of a template, the text of its value, and the arguments that this text uses."""

    key: str
    text: str
    first: int
    kinds: str  # the letter of each argument
    is_whole: bool  # the text is one argument and nothing else

    @property
    def is_literal_number(self) -> bool:
        return _LITERAL_NUMBER.fullmatch(self.text) is not None

    def fill(self, arguments: tuple[object, ...]) -> Value:
        if self.is_whole:
            argument = arguments[self.first]
            return self.key, None if argument is None else self.text % (argument,), self.kinds in _NUMBERS
        if not self.kinds:
            return self.key, self.text, self.is_literal_number
        arguments[self.first + len(self.kinds) - 1]  # raises IndexError if an argument is missing
        return self.key, self.text % arguments[self.first : self.first + len(self.kinds)], False


@lru_cache(1024)
def _find_places(template: str) -> tuple[_Place, ...] | None:
    pairs = split_template(template)
    if pairs is None:
        return None
    places: list[_Place] = []
    for key, text in pairs:
        kinds = "".join(_ARGUMENT.findall(text))
        first = sum(len(place.kinds) for place in places)
        places.append(_Place(key, _unquoted(text), first, kinds, _ARGUMENT.fullmatch(text) is not None))
    return tuple(places)


def split_template(template: str) -> tuple[tuple[str, str], ...] | None:
    """Return the keys of a message, each with its value's text in the template; None if the message is not ours."""
    if not template.startswith("event="):
        return None
    pairs, end = [], 0
    while end < len(template):
        if (match := _PAIR.match(template, end)) is None:
            return None
        pairs.append((match[1], match[2]))
        end = match.end()
    return tuple(pairs)


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        return text
