"""Tests that the operator exports a span for each reconcile, against a real API server.

At night, the spans are read back from the OpenTelemetry Collector too.
"""

import re
import signal

import pytest
from tests.operator.stage import Stage, wait_until
from tests.operator.test_process import process
from tests.process.collector import AnyCollector
from tests.process.otel_collector import COLLECTORS


@pytest.mark.parametrize("kind", COLLECTORS)
def test_each_reconcile_is_a_span_whose_id_its_log_lines_have(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, kind: type[AnyCollector]
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with kind() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with process(stage) as running:
            wait_until("it is ready", lambda: running.get("/readyz")[0] == 200)
            stage.space.make_service()
            spans = collector.wait(lambda spans: any(span.attributes["conveyor.result"] == "done" for span in spans))
            assert "conveyor_operator_lost_spans_total 0.0" in running.get("/metrics")[1]
            assert running.end(signal.SIGTERM) == 0
        applied = [line for line in running.log if " event=apply " in line]
        assert applied
        traced = {match[1] for line in applied if (match := re.search(r" trace_id=(\w+)\n", line))}
        assert len(traced) > 0
        collector.wait(lambda spans: traced <= {span.trace_id for span in spans})
    (first, *_) = sorted(spans, key=lambda span: span.began)
    assert (first.program, first.name, first.is_server, first.parent_id) == (
        "conveyor-operator", "reconcile InferenceService", False, "",
    )  # fmt: skip
    described = {
        "k8s.namespace.name": stage.space.namespace, "conveyor.kind": "InferenceService", "conveyor.name": "qwen",
    }  # fmt: skip
    assert described.items() <= first.attributes.items()
    assert first.began < first.ended
