"""Tests that spans reach a collector, that they are lost rather than waited for, and that nothing runs without one."""

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from tests.process.collector import Collector

from conveyor_process.otlp import Tracer
from conveyor_process.settings import SettingsError
from conveyor_process.spans import build_tracer

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with Collector() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        yield collector


def start() -> Tracer:
    tracer = build_tracer("conveyor-test")
    assert tracer is not None
    return tracer


def end_spans(tracer: Tracer, number: int) -> None:
    for _ in range(number):
        now = time.monotonic()
        tracer.start("a", now).end(now, {})


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {ENDPOINT: ""},
        {ENDPOINT: "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "TRUE"},
        {ENDPOINT: "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
    ],
    ids=lambda variables: " ".join(variables) or "nothing",
)
def test_without_a_collector_there_is_no_tracer_and_nothing_is_imported(variables: dict[str, str]) -> None:
    program = (
        "import sys; from conveyor_process.spans import build_tracer; assert build_tracer('a') is None; "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], env={"PATH": "", **variables}, check=True)


def test_without_the_extra_the_program_runs_and_warns(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "conveyor_process.otlp", None)
    assert build_tracer("conveyor-test") is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "event=no_traces" in line
    assert "missing_extra=traces" in line


def test_a_span_and_its_parts_reach_the_collector_with_their_times(collector: Collector) -> None:
    tracer = start()
    began, unix = time.monotonic(), time.time()
    span = tracer.start("POST /v1/completions", began, SAMPLED)
    span.add_part("queue", began, began + 0.25, {"conveyor.engine": "10.0.0.1:8000"})
    span.add_event("retry", began + 0.5, {"conveyor.reason": "lost"})
    span.end(began + 2, {"conveyor.attempts": 2}, "engine_lost")
    tracer.shut_down()

    part, whole = sorted(collector.spans, key=lambda span: span.is_server)
    assert (whole.program, whole.name, whole.is_server) == ("conveyor-test", "POST /v1/completions", True)
    assert (whole.trace_id, whole.parent_id) == (TRACE, CALLER)
    assert span.header == f"00-{TRACE}-{whole.span_id}-01"
    assert whole.attributes == {"conveyor.attempts": 2, "error.type": "engine_lost"}
    assert whole.events == [("retry", {"conveyor.reason": "lost"})]
    assert whole.has_failed
    assert (part.trace_id, part.parent_id, part.name) == (TRACE, whole.span_id, "queue")
    assert part.attributes == {"conveyor.engine": "10.0.0.1:8000"}
    assert not part.has_failed
    assert whole.began / 1e9 == pytest.approx(unix, abs=0.1)
    assert (whole.ended - whole.began) / 1e9 == pytest.approx(2, abs=1e-4)
    assert (part.ended - part.began) / 1e9 == pytest.approx(0.25, abs=1e-4)
    assert tracer.num_lost == 0


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x" * 8_000,
        TRACE,
        f"00-{'0' * 32}-{CALLER}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{CALLER}-01",
        f"00-{TRACE.upper()}-{CALLER}-01",
        f"00-{TRACE}-{CALLER}-01\n",
        f"00-{TRACE}-{CALLER}-01, 00-{TRACE}-{CALLER}-01",
    ],
    ids=range(9),
)
def test_an_invalid_trace_parent_begins_a_trace(collector: Collector, header: str) -> None:
    tracer = start()
    span = tracer.start("a", time.monotonic(), header)
    span.end(time.monotonic(), {})
    tracer.shut_down()
    (found,) = collector.spans
    assert found.parent_id == ""
    assert found.trace_id != TRACE
    assert not span.has_parent


def test_the_sampler_of_the_environment_decides_unless_the_caller_has(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    tracer = start()
    for header, flags in (("", "00"), (SAMPLED, "01"), (NOT_SAMPLED, "00")):
        now = time.monotonic()
        span = tracer.start("a", now, header)
        assert span.header.endswith(f"-{flags}")
        assert span.is_recording is (flags == "01")
        span.add_part("queue", now, now)
        span.add_event("retry", now)
        span.end(now, {})
    tracer.shut_down()
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert len(collector.spans) == 2


def test_own_names_and_attributes_of_the_environment_count(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "gateway-of-team-a")
    tracer = start()
    end_spans(tracer, 1)
    tracer.shut_down()
    assert [span.program for span in collector.spans] == ["gateway-of-team-a"]


def test_a_full_queue_loses_spans_and_delays_nobody(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    collector.answers.clear()
    tracer = start()
    began = time.monotonic()
    end_spans(tracer, 1_000)
    assert time.monotonic() - began < 5
    assert 980 <= tracer.num_lost <= 992, "the queue has 8, and the exporting thread at most 12"
    collector.answers.set()
    spans = collector.wait(lambda spans: len(spans) == 1_000 - tracer.num_lost)
    assert len(spans) >= 8


@pytest.mark.parametrize("status", [302, 304, 400])
def test_spans_that_the_collector_rejects_are_lost(collector: Collector, status: int) -> None:
    collector.status = status
    tracer = start()
    end_spans(tracer, 3)
    tracer.shut_down()
    assert tracer.num_lost == 3
    assert collector.spans == []


@pytest.mark.parametrize(("rejected", "num_lost"), [(0, 0), (2, 2), (1_000, 3), (-1, 0)])
def test_spans_that_the_collector_rejects_in_a_success_are_lost(
    collector: Collector, rejected: int, num_lost: int
) -> None:
    partial = ExportTracePartialSuccess(rejected_spans=rejected, error_message="too old")
    collector.pieces = (ExportTraceServiceResponse(partial_success=partial).SerializeToString(),)
    tracer = start()
    end_spans(tracer, 3)
    tracer.shut_down()
    assert tracer.num_lost == num_lost


def test_an_answer_that_is_not_a_collector_s_means_that_the_spans_are_lost(collector: Collector) -> None:
    collector.pieces = (b"<html>Sign in</html>",)
    tracer = start()
    end_spans(tracer, 3)
    tracer.shut_down()
    assert tracer.num_lost == 3


def test_little_of_an_endless_answer_is_read(collector: Collector) -> None:
    sent = itertools.count()
    collector.pieces = (bytes(2**16) for _ in sent)
    tracer = start()
    end_spans(tracer, 3)
    tracer.shut_down()
    assert tracer.num_lost == 3
    assert next(sent) < 1_000, "the sockets hold some"


def test_a_slow_answer_has_a_deadline(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")

    def drip() -> Iterator[bytes]:
        for _ in range(100):
            time.sleep(0.2)
            yield b"x"

    collector.pieces = drip()
    tracer = start()
    end_spans(tracer, 3)
    tracer.shut_down()
    assert tracer.num_lost == 3


def test_a_silent_collector_delays_the_end_by_seconds_at_most(collector: Collector) -> None:
    collector.answers.clear()
    tracer = start()
    end_spans(tracer, 1)
    began = time.monotonic()
    tracer.shut_down()
    assert time.monotonic() - began < 10


def test_invalid_variables_are_refused(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "many")
    with pytest.raises(SettingsError, match="OTEL_"):
        build_tracer("conveyor-test")
