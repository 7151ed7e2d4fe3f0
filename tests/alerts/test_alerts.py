"""Tests the chart's alerts, which docs/alerts.md shows, with promtool and the metrics of the real programs.

Each scene says which alerts fire, when, and for whom.
"""

import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.alerts.series import LENGTH, Series, constant, growing, scrape
from tests.chart.installation import find, render_json
from tests.gateway.process import GatewayProcess
from tests.metrics.aggregation import Aggregated
from tests.metrics.test_server import read_health
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Stage, wait_until
from tests.operator.test_process import process

from conveyor_api.names import SYSTEM_NAMESPACE
from e2e import promtool
from e2e.cluster import programs

pytestmark = pytest.mark.brings_promtool

Json = dict[str, Any]
MISSED = f"1x19 stale 1x{LENGTH}"


@dataclass(frozen=True, slots=True)
class Pages:
    """The /metrics pages of each program.

    The gateway has two: without requests, and while a request waits. The operator has one from before the service was
    ready, and one from after that.
    """

    namespace: str
    gateway: str
    waiting: str
    starting: str
    operator: str
    metrics: str

    def scrape(self, gateway: str, operator: str = "") -> list[Series]:
        """Return the series of two gateways, a leading operator, one that stands by, and a metrics server."""
        monitor = find(render_json(podMonitors={"create": True}), "PodMonitor", "conveyor")
        honors = monitor["spec"]["podMetricsEndpoints"][0].get("honorLabels", False)
        found = [each for number in (1, 2) for each in scrape(gateway, "gateway", number, honor_labels=honors)]
        found += scrape(operator or self.operator, "operator", honor_labels=honors)
        found += scrape("conveyor_operator_leader 0\n", "operator", 2, honor_labels=honors)
        return [*found, *scrape(self.metrics, "metrics", honor_labels=honors)]


@pytest.fixture
def pages(stage: Stage, gateway: GatewayProcess, aggregated: Aggregated) -> Pages:
    with process(stage) as operator:
        stage.space.make_service(queue={"timeout": "10s"}, autoscaling={"minReplicas": 1, "maxReplicas": 3})
        stage.space.wait_children("qwen")
        service = {"namespace": stage.space.namespace, "inference_service": "qwen"}
        thread = threading.Thread(target=send, args=(f"{gateway.url}/{stage.space.namespace}/qwen/v1/completions",))
        wait_until("it is known", lambda: gateway.demand(f"{stage.space.namespace}/qwen"))
        thread.start()
        wait_until("a request waits", lambda: gateway.metric("conveyor_gateway_queued_requests", **service))
        waiting = gateway.admin("/metrics")[1]
        thread.join(60)
        idle, starting = gateway.admin("/metrics")[1], operator.get("/metrics")[1]
        with Kubelet(stage.space, ready):
            stage.space.wait_condition("qwen", "Ready", "True", "Ready")
            wait_until("it is up to date", lambda: 'reason="UpToDate"' in operator.get("/metrics")[1])
            started = operator.get("/metrics")[1]
        return Pages(
            namespace=stage.space.namespace,
            gateway=idle,
            waiting=waiting,
            starting=starting,
            operator=started,
            metrics=read_health(aggregated.admin_port, "/metrics")[1],
        )


def send(url: str) -> None:
    try:
        urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=60).close()
    except urllib.error.HTTPError as error:
        error.close()


@dataclass(frozen=True, slots=True)
class Scene:
    """The series of three hours, and the alerts that must fire: minute -> their labels."""

    name: str
    series: Iterable[Series]
    fires: dict[int, list[Json]] = field(default_factory=dict)

    def write(self) -> Json:
        expression = 'count by (alertname, namespace, inference_service, pod) (ALERTS{alertstate="firing"})'
        tests = [
            {
                "expr": expression,
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": describe(labels), "value": 1} for labels in expected],
            }
            for minute, expected in self.fires.items()
        ]
        series = [each.write() for each in self.series]
        return {"name": self.name, "interval": "30s", "input_series": series, "promql_expr_test": tests}


def describe(labels: Json) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def change(series: Iterable[Series], values: str, **expected: str) -> list[Series]:
    """Return the series, with other values for those that have this `name` or these labels."""

    def is_meant(each: Series) -> bool:
        labels = {"name": each.name, **each.labels}
        return expected.items() <= labels.items()

    found = list(series)
    assert any(map(is_meant, found)), f"no program exposes {expected}"
    return [replace(each, values=values) if is_meant(each) else each for each in found]


def judge(series: Iterable[Series], type: str, status: str, reason: str) -> list[Series]:
    """Return the series. The operator's condition of this type has another status and reason."""
    found = list(series)
    assert any(each.labels.get("type") == type for each in found), f"the operator exposes no condition {type}"
    return [
        each.change(each.values, status=status, reason=reason) if each.labels.get("type") == type else each
        for each in found
    ]


def stop(series: Iterable[Series], **labels: str) -> list[Series]:
    """Return the series. Those with these labels end after ten minutes."""
    ended = f"x19 stale _x{LENGTH}"
    return [
        replace(each, values=each.values.removesuffix(f"x{LENGTH}") + ended) if labels.items() <= each.labels.items()
        else each
        for each in series
    ]  # fmt: skip


def add(series: Iterable[Series], exposed: str, name: str, container: str, **labels: str) -> list[Series]:
    """Return the series with one more, which is a growing counter that a program exposes."""
    found = list(series)
    assert f"# TYPE {name}" in exposed
    like = next(each for each in found if each.labels["container"] == container)
    target = {key: like.labels[key] for key in ("job", "container", "endpoint", "pod")}
    return [*found, Series(name, {"namespace": SYSTEM_NAMESPACE, **target, **labels}, growing())]


def build_scenes(pages: Pages) -> list[Scene]:
    healthy = pages.scrape(pages.gateway)
    service = {"namespace": pages.namespace, "inference_service": "qwen"}
    gateway_page, request = pages.gateway, "conveyor_gateway_requests_total"

    def fires(alert: str, **labels: str) -> dict[int, list[Json]]:
        return {150: [{"alertname": alert, **labels}]}

    def grow(name: str, **labels: str) -> list[Series]:
        return add(healthy, gateway_page, name, "gateway", **service, **labels)

    def judged(type: str, status: str, reason: str, values: str) -> list[Series]:
        """Return only the condition, with values of its own."""
        series = judge(healthy, type, status, reason)
        return [replace(each, values=values) for each in series if each.labels.get("type") == type]

    def replicas(desired: int, maximum: int, queue: str) -> list[Series]:
        counts = {"desired": desired, "maximum": maximum}
        series = change(healthy, queue, name="conveyor_gateway_queue_depth", **service)
        for of, count in counts.items():
            series = change(series, constant(count), name="conveyor_operator_replicas", of=of, **service)
        return series

    queue = "conveyor_gateway_queued_requests"
    stuck = change(change(healthy, constant(3), name=queue, **service), constant(1),
                   name="conveyor_gateway_engines", **service)  # fmt: skip
    leader = {"name": "conveyor_operator_leader", "pod": "conveyor-operator-1"}
    soon = constant(150 * 60 + 5 * 86400)
    return [
        Scene("all is well", healthy, {minute: [] for minute in (5, 30, 150)}),
        Scene("all operators gone", stop(healthy, container="operator"), {12: [], **fires("ConveyorNoOperatorActs")}),
        Scene("nobody takes over", change(healthy, constant(0), **leader), fires("ConveyorNoOperatorActs")),
        Scene("one missed scrape", change(healthy, MISSED, **leader), {minute: [] for minute in range(9, 16)}),
        Scene("all gateways gone", stop(healthy, container="gateway"), {12: [], **fires("ConveyorGatewaysGone")}),
        Scene("a gateway gone", stop(healthy, pod="conveyor-gateway-1"), {150: []}),
        Scene("no metrics server", stop(healthy, container="metrics"), {12: [], **fires("ConveyorMetricsServerGone")}),
        Scene(
            "a request waits without an engine",
            pages.scrape(pages.waiting),
            fires("ConveyorRequestsWaitWithoutEngine", **service),
        ),
        Scene("engines answer nothing", stuck, fires("ConveyorQueueStuck", **service)),
        Scene("engines answer", add(stuck, gateway_page, request, "gateway", code="200", **service), {150: []}),
        Scene("queue full", grow(request, code="429"), fires("ConveyorQueueFull", **service)),
        Scene("too late", grow(request, code="504"), fires("ConveyorRequestsTimeOut", **service)),
        Scene("a start fails", grow(request, code="503"), fires("ConveyorRequestsUnavailable", **service)),
        Scene(
            "engines end",
            grow("conveyor_gateway_dropped_requests_total", reason="engine_lost"),
            fires("ConveyorEnginesBreakOff", **service),
        ),
        Scene(
            "the API server is silent",
            change(healthy, constant(200), name="conveyor_gateway_watch_silence_seconds", pod="conveyor-gateway-2",
                   watch=f"inferenceservices/{pages.namespace}"),
            fires("ConveyorGatewayWatchSilent", pod="conveyor-gateway-2"),
        ),
        Scene(
            "a service is not ready", pages.scrape(pages.gateway, pages.starting),
            {9: [], **fires("ConveyorServiceNotReady", **service)},
        ),
        Scene("the reason changes", [*judged("Ready", "False", "ImagePullFailed", f"1x30 stale _x{LENGTH}"),
                                     *judged("Ready", "False", "CrashLoop", f"_x30 1x{LENGTH}"),
                                     *(each for each in healthy if each.labels.get("type") != "Ready")],
              {20: [{"alertname": "ConveyorServiceNotReady", **service}]}),
        Scene("nobody wants an engine", judge(healthy, "Ready", "True", "ScaledToZero"), {150: []}),
        Scene(
            "a rollout fails", judge(healthy, "Progressing", "False", "ImagePullFailed"),
            {9: [], **fires("ConveyorRolloutFails", **service)},
        ),
        Scene("a rollout runs", judge(healthy, "Progressing", "True", "RollingOut"), {150: []}),
        Scene(
            "the first start fails",
            judge(judge(healthy, "Progressing", "False", "NoDevice"), "Ready", "False", "NoDevice"),
            fires("ConveyorServiceNotReady", **service),
        ),
        Scene("at the maximum with a queue", replicas(3, 3, queue=constant(2)),
              {29: [], **fires("ConveyorServiceAtMaximum", **service)}),
        Scene("at the maximum, and the queue is short now and then",
              replicas(3, 3, queue="4 0 " * (LENGTH // 2)), fires("ConveyorServiceAtMaximum", **service)),
        Scene("at the maximum without a queue", replicas(3, 3, queue=constant(0)), {150: []}),
        Scene("below the maximum with a queue", replicas(2, 3, queue=constant(2)), {150: []}),
        Scene(
            "reconciles fail",
            add(healthy, pages.operator, "conveyor_operator_reconciles_total", "operator", result="error"),
            fires("ConveyorOperatorFails"),
        ),
        Scene(
            "workers are busy",
            change(healthy, constant(2), name="conveyor_operator_queue_depth"),
            fires("ConveyorOperatorQueueStuck", namespace=SYSTEM_NAMESPACE, pod="conveyor-operator-1"),
        ),
        Scene(
            "a gateway cannot be read",
            add(healthy, pages.metrics, "conveyor_metrics_gateway_reads_total", "metrics", outcome="failed"),
            fires("ConveyorMetricsUnreadable"),
        ),
        Scene(
            "the certificate ends",
            change(healthy, soon, name="conveyor_metrics_serving_certificate_expiry_timestamp_seconds"),
            fires("ConveyorCertificateExpires", namespace=SYSTEM_NAMESPACE, pod="conveyor-metrics-1"),
        ),
    ]  # fmt: skip


def test_each_alert_fires_for_its_cause_and_none_for_another(pages: Pages, tmp_path: Path) -> None:
    rules = find(render_json(prometheusRules={"create": True}), "PrometheusRule", "conveyor")["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    scenes = build_scenes(pages)
    fired = {labels["alertname"] for scene in scenes for expected in scene.fires.values() for labels in expected}
    assert fired == {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "30s", "tests": [each.write() for each in scenes]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    tool = promtool.build()
    for command in (("check", "rules", "rules.yaml"), ("test", "rules", "tests.yaml")):
        done = programs.run(tool, *command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
