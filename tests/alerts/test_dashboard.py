"""Tests the queries of the chart's Grafana dashboard and of the console on what all four programs expose.

No Grafana runs here.
"""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.alerts.conftest import CLIENT_HEADER
from tests.alerts.series import Series, scrape
from tests.chart.installation import CHART, find, render_json
from tests.engine.chat_model import write_chat_model
from tests.engine.lora import save_adapter
from tests.engine.processes import EngineServer
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.keys import make_api_key, make_key
from tests.gateway.process import GatewayProcess
from tests.metrics.aggregation import Aggregated, DemandServer
from tests.metrics.test_server import read_health
from tests.operator.kubelet import TIME, Kubelet, ready
from tests.operator.stage import Stage, wait_until
from tests.operator.test_process import Process, process

from conveyor_api import names
from conveyor_api.names import child_labels
from conveyor_console.prometheus import QUERIES, build_query
from e2e import promtool
from e2e.cluster import programs

Json = dict[str, Any]
SERVICE = "qwen"
_NAME = re.compile(r"\b(?:conveyor_|vllm:|process_)\w+")
_GROUP = re.compile(r"by \(([^)]*)\)")
_MATCHED = re.compile(r'(\w+)=~?"')


def read_queries(namespace: str) -> list[str]:
    """Return the queries of all panels, with the variables' values as Grafana fills them in, and the console's."""
    values = {"$namespace": namespace, "$service": SERVICE, "$__rate_interval": "5m"}
    panels = json.loads((CHART / "dashboards" / "conveyor.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for name, value in values.items():
        found = [query.replace(name, value) for query in found]
    return found + [build_query(query, f"{namespace}/{SERVICE}", 300) for query in QUERIES.values()]


def read_variables() -> list[str]:
    listed = json.loads((CHART / "dashboards" / "conveyor.json").read_text())["templating"]["list"]
    return [variable["query"] for variable in listed if variable["type"] == "query"]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineServer]:
    """An engine with batches that close, and with a LoRA adapter, with which it has answered a request."""
    model = write_chat_model(tmp_path / "tiny")
    save_adapter(model, tmp_path / "sql", 1)
    options = {"adapters": f"sql={tmp_path / 'sql'}", "host": "0.0.0.0", "max_num_seqs": 4, "batching_mode": "dynamic"}
    with EngineServer(tmp_path / "server", model, **options) as started:
        started.wait_ready()
        assert started.post("/v1/completions", {"model": "tiny:sql", "prompt": "a", "max_tokens": 3}).status_code == 200
        yield started


@pytest.fixture
def series(
    stage: Stage,
    gateway: GatewayProcess,
    engine: EngineServer,
    aggregated: Aggregated,
    start_gateway: Callable[..., DemandServer],
) -> list[Series]:
    """What Prometheus has of a service that is not ready, and of one whose only engine died after an answer."""
    service = {"namespace": stage.space.namespace, "inference_service": SERVICE}
    with process(stage) as operator, Kubelet(stage.space, ready_at_once, addresses=False):
        stage.space.make_service(SERVICE, queue={"timeout": "10s", "classes": [{"name": "chat", "level": 0}]})
        stage.space.make_service("broken", model={"uri": "pvc://no-such-claim/demo"})
        port = int(engine.url.rpartition(":")[2])
        Cluster(stage.space.api, stage.space.namespace).apply_engine(SERVICE, own_address(), port)
        wait_until("the engine is known", lambda: gateway.metric("conveyor_gateway_engines", **service))
        assert send(gateway, stage.space.namespace) == 200
        reach_limit(gateway, stage)
        engine_page = engine.get("/metrics").text
        engine.process.kill()
        assert send(gateway, stage.space.namespace) == 504
        stage.space.wait_condition("broken", "Ready", "False", "NoReadyEndpoints")
        texts = ("conveyor_operator_pod_start_seconds_c", 'reason="NoReadyEndpoints"')
        operator_page = wait_until("a pod's start and a broken service", lambda: find_page(operator, *texts))
    aggregated.set_gateways(start_gateway({f"default/{SERVICE}": {}}))
    wait_until(
        "a read of a gateway", lambda: aggregated.code(SERVICE) and "gateway_reads_total{" in page_of(aggregated)
    )

    monitors = [find(render_json(podMonitors={"create": True}), "PodMonitor", f"conveyor{n}") for n in ("", "-engine")]
    ours, engines = (monitor["spec"]["podMetricsEndpoints"][0] for monitor in monitors)
    pages = {"gateway": gateway.admin("/metrics")[1], "operator": operator_page, "metrics": page_of(aggregated)}
    found = [
        each for name, page in pages.items() for each in scrape(page, name, honor_labels=ours.get("honorLabels", False))
    ]
    target = {"namespace": stage.space.namespace, "pod": f"{SERVICE}-0", **relabel_target(engines["relabelings"])}
    return [*found, *scrape(engine_page, "engine", honor_labels=engines.get("honorLabels", False), **target)]


def ready_at_once(pod: Json) -> Json:
    """Return the status of a pod that was ready when it was created, so that the operator measures its start."""
    status: Json = json.loads(json.dumps(ready(pod)).replace(TIME, pod["metadata"]["creationTimestamp"]))
    return status


def reach_limit(gateway: GatewayProcess, stage: Stage) -> None:
    """Let a key send more requests than it may."""
    namespace = stage.space.namespace
    path = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{namespace}/{names.API_KEY_PLURAL}"
    stage.space.api.create(path, make_api_key(namespace, owner="ann", limits={"requestsPerMinute": 1}))
    headers = {"Authorization": f"Bearer {make_key(namespace)}"}
    wait_until("the key is at its limit", lambda: send(gateway, namespace, **headers) == 429)


def send(gateway: GatewayProcess, namespace: str, **headers: str) -> int:
    url, body = f"{gateway.url}/{namespace}/{SERVICE}/v1/completions", {"prompt": "a", "max_tokens": 3}
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"X-Request-Class": "chat", CLIENT_HEADER: "team-a", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def find_page(operator: Process, *texts: str) -> str | None:
    page = operator.get("/metrics")[1]
    return page if all(text in page for text in texts) else None


def page_of(aggregated: Aggregated) -> str:
    return read_health(aggregated.admin_port, "/metrics")[1]


def relabel_target(relabelings: list[Json]) -> dict[str, str]:
    """Return the labels that a PodMonitor copies from the labels of an engine's pod."""
    names = {key: re.sub(r"\W", "_", key) for key in child_labels(SERVICE)}
    labels = {f"__meta_kubernetes_pod_label_{names[key]}": value for key, value in child_labels(SERVICE).items()}
    return {each["targetLabel"]: labels[each["sourceLabels"][0]] for each in relabelings}


@pytest.mark.slow
def test_every_name_and_label_of_a_query_is_exposed(series: list[Series], namespace: str) -> None:
    exposed: dict[str, set[str]] = {}
    for each in series:
        exposed.setdefault(each.name, set()).update(each.labels)
    queries = read_queries(namespace)
    assert len(queries) > 40
    for query in queries:
        expected = {label for group in _GROUP.findall(query) for label in group.split(", ")}
        expected |= set(_MATCHED.findall(query))
        for name in _NAME.findall(query):
            assert name in exposed, query
            assert expected <= exposed[name], query
    for variable in read_variables():
        found = re.fullmatch(r"label_values\((\w+)(?:\{(\w+)=.*\})?, (\w+)\)", variable)
        assert found
        assert {label for label in found.groups()[1:] if label} <= exposed[found[1]]


@pytest.mark.brings_promtool
def test_every_query_is_promql_and_finds_series(series: list[Series], namespace: str, tmp_path: Path) -> None:
    found = [{"labels": "{}", "value": 1}]
    tests = [
        {"expr": f"count({query}) > bool 0", "eval_time": "60m", "exp_samples": found}
        for query in read_queries(namespace)
    ]
    scene = {"interval": "30s", "input_series": [each.write() for each in series], "promql_expr_test": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": [scene]}))
    command = (promtool.build(), "test", "rules", "tests.yaml")
    done = programs.run(*command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
