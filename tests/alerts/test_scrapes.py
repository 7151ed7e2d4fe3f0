"""Tests with a real Prometheus which labels the gateways' series get, whether it honours their labels or not."""

import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.installation import find, render_json
from tests.gateway.process import GatewayProcess
from tests.operator.stage import Space, wait_until

from conveyor_api.names import SYSTEM_NAMESPACE
from e2e import promtool
from e2e.cluster.paths import REPOSITORY

pytestmark = pytest.mark.brings_promtool

SERIES = "conveyor_gateway_queued_requests"


def rules_of_the_page() -> list[Any]:
    (block,) = re.findall(
        r"```yaml\n(metric_relabel_configs:.*?)```", (REPOSITORY / "docs/monitoring.md").read_text(), re.DOTALL
    )
    rules: list[Any] = yaml.safe_load(block)["metric_relabel_configs"]
    return rules


def rules_of_the_chart() -> list[Any]:
    """Return the rules of the PodMonitor as the Prometheus Operator writes them."""
    monitor = find(render_json(podMonitors={"create": True}), "PodMonitor", "conveyor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    return [
        {re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", key): value for key, value in rule.items()}
        for rule in endpoint["metricRelabelings"]
    ]


def scrape(folder: Path, port: int, honor_labels: bool, rules: list[Any]) -> list[dict[str, str]]:
    """Run Prometheus until it has the series, and return their labels."""
    job = {
        "job_name": "conveyor",
        "honor_labels": honor_labels,
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": SYSTEM_NAMESPACE}}],
        "metric_relabel_configs": rules,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    promtool.build()
    flags = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([promtool.SERVER, *flags], cwd=folder, stdout=log, stderr=log)
    try:
        return wait_until("the series", lambda: query(f"http://{address}"), 60)
    finally:
        process.kill()
        process.wait(30)


def query(url: str) -> list[dict[str, str]]:
    expression = urllib.parse.urlencode({"query": f'{SERIES}{{inference_service="qwen"}}'})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{expression}", timeout=5) as answer:
            return [each["metric"] for each in json.load(answer)["data"]["result"]]
    except OSError:
        return []


@pytest.mark.parametrize(
    ("honor_labels", "rules", "expected"),
    [
        (True, rules_of_the_chart, "the service's"),
        (False, rules_of_the_chart, "the service's"),
        (False, rules_of_the_page, "the service's"),
        (False, list, "the release's"),
    ],
)
def test_series_of_the_gateway_have_the_namespace_of_the_service(
    gateway: GatewayProcess, space: Space, tmp_path: Path, honor_labels: bool, rules: Any, expected: str
) -> None:
    space.make_service()
    wait_until("it is known", lambda: gateway.demand(f"{space.namespace}/qwen"))
    (labels,) = scrape(tmp_path, gateway.admin_port, honor_labels, rules())
    assert labels["namespace"] == (space.namespace if expected == "the service's" else SYSTEM_NAMESPACE)
    assert ("exported_namespace" in labels) == (expected == "the release's")
