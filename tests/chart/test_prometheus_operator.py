"""Tests the objects that Prometheus Operator reads: PodMonitors, and the alerts as a PrometheusRule."""

import re

import yaml
from tests.chart.installation import CHART, PROCESSES, Json, find, render_json

from conveyor_api import names
from e2e.cluster.paths import REPOSITORY


def test_pod_monitors_find_the_pods_and_their_ports(rendered: list[Json]) -> None:
    assert "PodMonitor" not in {item["kind"] for item in rendered}
    settings = {"create": True, "labels": {"release": "prometheus"}, "interval": "7s"}
    objects = render_json(podMonitors=settings, watchNamespaces=["team-a"])
    ours, engines = (find(objects, "PodMonitor", name) for name in ("conveyor", "conveyor-engine"))
    selector = ours["spec"]["selector"]
    for process in PROCESSES:
        template = find(objects, "Deployment", f"conveyor-{process}")["spec"]["template"]
        labels = template["metadata"]["labels"]
        assert selector["matchLabels"].items() <= labels.items()
        assert labels[names.NAME_LABEL] in selector["matchExpressions"][0]["values"]
        (endpoint,) = ours["spec"]["podMetricsEndpoints"]
        expected = {"port": "admin", "path": names.PROMETHEUS_PATH, "interval": "7s", "honorLabels": True}
        relabeled = {"metricRelabelings": endpoint["metricRelabelings"]}  # tests/alerts/test_scrapes.py tries them
        assert endpoint == {**expected, **relabeled}
        assert "admin" in {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert engines["spec"]["selector"]["matchLabels"].items() <= names.child_labels("qwen").items()
    assert engines["spec"]["podMetricsEndpoints"][0]["port"] == names.ENGINE_PORT_NAME
    assert "honorLabels" not in engines["spec"]["podMetricsEndpoints"][0], "tenants write what engines expose"
    (relabeling,) = engines["spec"]["podMetricsEndpoints"][0]["relabelings"]
    of_the_pod = re.sub(r"\W", "_", names.INFERENCE_SERVICE_LABEL)  # as Prometheus writes a label's name
    assert relabeling["sourceLabels"] == [f"__meta_kubernetes_pod_label_{of_the_pod}"]
    assert relabeling["targetLabel"] == "inference_service"
    assert engines["spec"]["namespaceSelector"] == {"matchNames": ["team-a"]}
    assert {item["metadata"]["labels"]["release"] for item in (ours, engines)} == {"prometheus"}
    everywhere = find(render_json(podMonitors=settings), "PodMonitor", "conveyor-engine")
    assert everywhere["spec"]["namespaceSelector"] == {"any": True}


def test_alerts_are_a_prometheus_rule_whose_runbook_is_the_page(rendered: list[Json]) -> None:
    assert "PrometheusRule" not in {item["kind"] for item in rendered}
    settings = {"create": True, "labels": {"release": "prometheus"}, "runbookUrl": "https://wiki.example.com/alerts"}
    rule = find(render_json(prometheusRules=settings), "PrometheusRule", "conveyor")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    written = yaml.safe_load((CHART / "alerts.yaml").read_text())["groups"]
    page = (REPOSITORY / "docs" / "alerts.md").read_text()
    for group, source in zip(rule["spec"]["groups"], written, strict=True):
        for alert, plain in zip(group["rules"], source["rules"], strict=True):
            url = alert["annotations"].pop("runbook_url")
            assert alert == plain
            assert url == f"https://wiki.example.com/alerts#{alert['alert'].lower()}"
            assert f"\n## {alert['alert']}\n" in page
            assert alert["labels"]["severity"] in ("critical", "warning")
            assert alert["for"]
    plain_rule = find(render_json(prometheusRules={"create": True}), "PrometheusRule", "conveyor")
    assert plain_rule["spec"]["groups"] == written
    without = find(render_json(prometheusRules=settings, metrics={"enabled": False}), "PrometheusRule", "conveyor")
    assert {group["name"] for group in without["spec"]["groups"]} == {"conveyor-gateway", "conveyor-operator"}
