"""Tests that each event is one line, whatever its content, in two formats with the same keys."""

import json
import logging
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.process.lines import read_json, read_logfmt

from conveyor_process import log
from conveyor_process.log import LogFormat, _JsonFormatter, _LogfmtFormatter, quote, set_up_log, without_secrets
from conveyor_process.tracing import enter_trace

FORMATTERS: dict[LogFormat, tuple[logging.Formatter, Any]] = {
    "logfmt": (_LogfmtFormatter(), read_logfmt),
    "json": (_JsonFormatter(), read_json),
}


@pytest.fixture(params=FORMATTERS)
def log_format(request: pytest.FixtureRequest) -> LogFormat:
    return request.param  # type: ignore[no-any-return]


def write(log_format: LogFormat, message: object, *arguments: object, name: str = "x", error: Any = None) -> str:
    record = logging.LogRecord(name, logging.INFO, __file__, 1, message, arguments, error)
    return FORMATTERS[log_format][0].format(record)


def read(log_format: LogFormat, message: object, *arguments: object, name: str = "x") -> dict[str, Any]:
    """Return the pairs of the line without time and level."""
    line: dict[str, Any] = FORMATTERS[log_format][1](write(log_format, message, *arguments, name=name))
    assert list(line)[:3] == ["time", "level", "event"]
    del line["time"], line["level"]
    return line


def test_a_line_is_an_event_with_values(log_format: LogFormat) -> None:
    line = read(log_format, "event=ready port=%d part=%s key=%s/%s", 8000, "a b", "c", "d")
    assert {key: str(value) for key, value in line.items()} == {
        "event": "ready", "port": "8000", "part": "a b", "key": "c/d",
    }  # fmt: skip


def test_the_template_decides_which_keys_are_numbers_in_json() -> None:
    line = read("json", "event=x a=%d b=%.2f c=%s d=%s e=%g f=%s", 1, 0.5, 3, "4", float("nan"), True)
    assert line == {"event": "x", "a": 1, "b": 0.5, "c": "3", "d": "4", "f": "True"}


def test_a_literal_number_is_one_only_if_json_can_write_it_so() -> None:
    line = read("json", "event=x a=007 b=-1.5 c=0 d=-0.25 e=1.")
    assert line == {"event": "x", "a": "007", "b": -1.5, "c": 0, "d": -0.25, "e": "1."}


@pytest.mark.parametrize(
    ("message", "arguments"), [("event=x pct=%d%%", (None,)), ("event=x a=%d", ("b",)), ("a %s", ()), ("%s %s", (1,))]
)
def test_a_message_whose_arguments_do_not_fit_is_logged_without_them(
    message: str, arguments: tuple[object, ...], log_format: LogFormat
) -> None:
    assert message in read(log_format, message, *arguments)["message"]


@pytest.mark.parametrize("name", ["a", "a b"])
def test_unknown_values_are_left_out_in_json(name: str) -> None:
    message, values = "event=x a=%d b=%s c=%.4f d=%d", (None, name, None, 5)
    assert read("json", message, *values) == {"event": "x", "b": name, "d": 5}
    assert write("logfmt", message, *values).endswith(f" event=x a=- b={quote(name)} c=- d=5")


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("header", "trace_id"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", TRACE),
        (f"01-{TRACE}-00f067aa0ba902b7-01-more", TRACE),
        ("", None),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE.upper()}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE}-00f067aa0ba902b7-01 a=b", None),
    ],
)
@pytest.mark.parametrize("value", ["a", "a b"])
def test_lines_about_a_request_have_its_trace(
    value: str, header: str, trace_id: str | None, log_format: LogFormat
) -> None:
    enter_trace(header)
    try:
        assert read(log_format, "event=x a=%s", value).get("trace_id") == trace_id
    finally:
        enter_trace("")


TEXTS = st.text() | st.text('ab-/.:"= \\%{\n')  # most of the second kind need no quotes, or almost none


@given(TEXTS, TEXTS)
def test_whatever_a_client_sends_stays_one_value_of_one_printable_line(first: str, second: str) -> None:
    for log_format in FORMATTERS:
        text = write(log_format, "event=request id=%s path=%s/%s status=%d", first, first, second, 200)
        assert text.isprintable()
        line = read(log_format, "event=request id=%s path=%s/%s status=%d", first, first, second, 200)
        assert list(line) == ["event", "id", "path", "status"]
        assert (line["id"], line["path"]) == (first, f"{first}/{second}")


@pytest.mark.parametrize("error", [None, (ValueError, ValueError("x"), None)])
@pytest.mark.parametrize(
    ("message", "arguments", "line"),
    [
        ("event=x a=%s b=%d c=%.2f d=%s", ("é:1", 2, 0.5, 3), "event=x a=é:1 b=2 c=0.50 d=3"),
        ("event=x a=%s b=%s", ("", "b"), 'event=x a="" b=b'),
        ("event=x a=%s b=%s", ("a b", "c=d"), 'event=x a="a b" b="c=d"'),
        ("event=x a=%s", ("\x1b[31m\n",), 'event=x a="\\u001b[31m\\n"'),
        ("event=x a=%s b=%s", (None, True), "event=x a=- b=True"),
        ("event=x a=%5s b=%s/%s", ("a", "b", "c"), 'event=x a="    a" b=b/c'),
        ('event=x a="b c" d=%s', ("e",), 'event=x a="b c" d=e'),
        ("event=x a=%d%% b=%s", (5, "c"), "event=x a=5% b=c"),
    ],
)
def test_a_value_is_quoted_only_if_it_must_be(
    message: str, arguments: tuple[object, ...], line: str, error: Any
) -> None:
    """With an error, each value is quoted alone. Without one, all values are checked together."""
    written = write("logfmt", message, *arguments, error=error)
    assert written.split(" ", 2)[2].partition(" traceback=")[0] == line


@pytest.mark.parametrize("message", ["Application %s: 50%% done", "event=of a sentence %s", "\x1b[31m%s"])
def test_what_is_no_message_of_ours_is_one_value(log_format: LogFormat, message: str) -> None:
    line = read(log_format, message, "a\nb=c", name="kopf.objects")
    assert line == {"event": "log", "logger": "kopf.objects", "message": message % "a\nb=c"}


def test_a_line_that_was_made_elsewhere_keeps_its_values(log_format: LogFormat) -> None:
    line = read(log_format, 'event=model_loading path="/a b/50%s" layers=3')
    assert line == {"event": "model_loading", "path": "/a b/50%s", "layers": 3 if log_format == "json" else "3"}


def test_a_traceback_is_one_value_without_secrets(log_format: LogFormat) -> None:
    try:
        raise ValueError("a\nb, see https://me:secret@storage/file?Signature=abc")
    except ValueError:
        text = write(log_format, "event=failed", error=sys.exc_info())
    line = FORMATTERS[log_format][1](text)
    assert line["traceback"].startswith("Traceback (most recent call last):\n")
    assert line["traceback"].endswith("ValueError: a\nb, see https://storage/file")


def test_the_whole_process_writes_so(capsys: pytest.CaptureFixture[str], log_format: LogFormat) -> None:
    set_up_log("INFO", log_format, quiet=("uvicorn.error",))
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("asyncio").debug("Using selector")
    logging.getLogger("conveyor_x").info("event=serving port=%d", 80)
    lines = [FORMATTERS[log_format][1](line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["event"]) for line in lines] == [("WARNING", "log"), ("INFO", "serving")]
    assert lines[0]["message"] == "Invalid HTTP request received."


def test_at_debug_only_our_own_loggers_say_more(capsys: pytest.CaptureFixture[str], log_format: LogFormat) -> None:
    """At debug, libraries log whole bodies, including those of Secrets."""
    set_up_log("DEBUG", log_format)
    for name in ("kubernetes.aio.client.rest", "aiohttp", "kopf", "conveyor_gateway.relaying"):
        logging.getLogger(name).debug("event=detail body=%s", "secret")
    lines = [FORMATTERS[log_format][1](line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["event"]) for line in lines] == [("DEBUG", "detail")]
    set_up_log("INFO", log_format)
    logging.getLogger("conveyor_gateway.relaying").debug("event=detail body=%s", "secret")
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "a"),
        ("5", "5"),
        ("", '""'),
        ("a b", '"a b"'),
        ('a"b', '"a\\"b"'),
        ("a=b", '"a=b"'),
        ("ä", "ä"),
        ("\x7f", '"\\u007f"'),
    ],
)
def test_values_are_bare_words_or_json_strings(value: str, text: str) -> None:
    assert quote(value) == text
    assert value == (json.loads(text) if text.startswith('"') else text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("from https://storage:443/a/b?X-Amz-Signature=abc&Expires=1: broken", "from https://storage:443/a/b broken"),
        ("'http://user:password@mirror:8080/x'", "'http://mirror:8080/x'"),
        ("HTTP://token@mirror", "HTTP://mirror"),
        ("http://user:p@ss@mirror", "http://mirror"),
        ("is it so? see https://hub/org/tiny, please", "is it so? see https://hub/org/tiny, please"),
    ],
)
def test_urls_are_shown_without_what_may_be_secret(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_a_library_that_warns_without_end_gets_a_few_lines_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, clock = log._LibraryLimit(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def log_at(name: str, level: int) -> logging.LogRecord | None:
        record = logging.LogRecord(name, level, __file__, 1, "attempt %d failed", (1,), None)
        return record if limit.filter(record) else None

    for _ in range(3):
        assert sum(log_at("kopf.watching", logging.ERROR) is not None for _ in range(100)) == 20
        clock[0] += 60
    kept = log_at("kopf.watching", logging.ERROR)
    assert kept is not None
    assert kept.getMessage() == "attempt 1 failed (80 more in the minute before)"
    assert all(log_at("kopf.watching", logging.INFO) for _ in range(100)), "what is routine is not limited"
    assert all(log_at("conveyor_operator.loop", logging.ERROR) for _ in range(100)), "nor what is our own"
    assert log_at("kopf.other", logging.ERROR), "nor another logger for it"
