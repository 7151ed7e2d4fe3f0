"""Tests the API through the aggregation layer of a real API server, and directly at the port."""

import json
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from tests.metrics.aggregation import Aggregated, DemandServer, write_serving_certificate

from conveyor_api.names import METRICS_VERSIONS
from e2e.cluster.api import ApiError
from e2e.cluster.certificates import Authority, KeyPair
from e2e.cluster.tools import binary

Json = dict[str, Any]
StartGateway = Callable[[dict[str, Json]], DemandServer]

METRICS = ("inference_in_flight", "inference_queue_depth")
COUNTS = ("inference_requests", "inference_waiting_requests")
OF_CLASSES = ("inference_class_queued", "inference_class_wait_seconds")
OF_LIMITS = ("inference_running_limit", "inference_limited_engines")
OF_REASON = "?metricLabelSelector=limit_reason%3D"
OF_CHAT = "?metricLabelSelector=request_class%3Dchat"


def build_demand(in_flight: int, queue_depth: int = 0) -> Json:
    return {"in_flight": in_flight, "queue_depth": queue_depth, "queued": in_flight, "dispatched": 0}


def eventually(expected: object, read: Callable[[], object]) -> None:
    """Wait for a result, because the metrics server learns of gateways by a watch, a moment after they exist."""
    deadline = time.monotonic() + 120
    while (seen := read()) != expected:
        assert time.monotonic() < deadline, f"{seen!r} is still not {expected!r}"
        time.sleep(0.05)


def read_value(aggregated: Aggregated, name: str, metric: str = METRICS[0], **more: str) -> str:
    try:
        (item,) = aggregated.value(name, metric, **more)["items"]
    except ApiError as error:
        return str(error.code)
    return str(item["value"])


@pytest.mark.parametrize("version", METRICS_VERSIONS)
def test_both_metrics_of_a_service_are_summed_over_the_gateways(
    aggregated: Aggregated, start_gateway: StartGateway, version: str
) -> None:
    one = start_gateway({"default/qwen": build_demand(40, 8), "other/qwen": build_demand(1, 1)})
    two = start_gateway({"default/qwen": build_demand(2, 1)})
    aggregated.set_gateways(one, two)
    eventually("42", lambda: read_value(aggregated, "qwen", METRICS[0], version=version))
    eventually("9", lambda: read_value(aggregated, "qwen", METRICS[1], version=version))
    eventually("1", lambda: read_value(aggregated, "qwen", METRICS[0], namespace="other"))
    values = aggregated.value("qwen", METRICS[0], version)
    assert values["apiVersion"] == f"custom.metrics.k8s.io/{version}"
    (item,) = values["items"]
    named = item["metricName"] if version == "v1beta1" else item["metric"]["name"]
    assert named == METRICS[0]
    assert item["describedObject"]["name"] == "qwen"


def test_kubectl_reads_a_value(aggregated: Aggregated, start_gateway: StartGateway) -> None:
    aggregated.set_gateways(start_gateway({"default/kubectl": build_demand(5)}))
    eventually("5", lambda: read_value(aggregated, "kubectl"))
    path = (
        "/apis/custom.metrics.k8s.io/v1beta2/namespaces/default/inferenceservices.conveyor.dev/kubectl/"
        "inference_in_flight"
    )
    command = [binary("kubectl"), "--kubeconfig", aggregated.plane.kubeconfig, "get", "--raw", path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["items"][0]["value"] == "5"


def test_an_outage_of_one_gateway_makes_every_value_unknown_until_it_is_back(
    aggregated: Aggregated, start_gateway: StartGateway
) -> None:
    good, bad = start_gateway({"default/qwen": build_demand(1)}), start_gateway({})
    aggregated.set_gateways(good, bad)
    eventually("1", lambda: read_value(aggregated, "qwen"))
    bad.status = 503
    with pytest.raises(ApiError, match="the sum over the gateways is not known") as refused:
        aggregated.value("qwen")
    assert refused.value.code == 503
    readable = "?metricLabelSelector=gateways%3DReadable"
    (item,) = aggregated.value("qwen", query=readable)["items"]
    assert item["metric"]["selector"] == {"matchLabels": {"gateways": "Readable"}}
    assert item["value"] == "1"
    bad.status = 200
    assert read_value(aggregated, "qwen") == read_value(aggregated, "qwen", query=readable) == "1"


def test_a_gateway_that_does_not_answer_in_time_makes_every_value_unknown(
    aggregated: Aggregated, start_gateway: StartGateway
) -> None:
    slow = start_gateway({"default/qwen": build_demand(1)})
    aggregated.set_gateways(slow)
    eventually("1", lambda: read_value(aggregated, "qwen"))
    slow.delay_seconds = 3
    assert aggregated.code("qwen") == 503


def test_what_waits_of_a_class_is_summed_over_the_gateways(aggregated: Aggregated, start_gateway: StartGateway) -> None:
    def build(queued: int, seconds: float) -> dict[str, Json]:
        return {"default/classed": build_demand(9) | {"classes": {"chat": {"queued": queued, "wait_seconds": seconds}}}}

    aggregated.set_gateways(start_gateway(build(3, 1.5)), start_gateway(build(2, 4.5)))
    eventually("5", lambda: read_value(aggregated, "classed", "inference_class_queued", query=OF_CHAT))
    assert read_value(aggregated, "classed", "inference_class_wait_seconds", query=OF_CHAT) == "4"
    (item,) = aggregated.value("classed", "inference_class_queued", query=OF_CHAT)["items"]
    assert item["metric"]["selector"] == {"matchLabels": {"request_class": "chat"}}


def test_the_limit_of_engines_is_their_mean_and_each_reason_has_its_number(
    aggregated: Aggregated, start_gateway: StartGateway
) -> None:
    engines = {"a:1": {"dispatched": 3, "waiting": 0, "carried": 16, "limit_reason": "missed"}}
    engines |= {"b:1": {"dispatched": 3, "waiting": 0, "carried": 24, "limit_reason": "slack"}}
    aggregated.set_gateways(
        start_gateway({"default/steered": build_demand(6) | {"batch_size": 64, "engines": engines}})
    )
    eventually("20", lambda: read_value(aggregated, "steered", "inference_running_limit"))
    counts = {
        reason: read_value(aggregated, "steered", "inference_limited_engines", query=f"{OF_REASON}{reason}")
        for reason in ("missed", "slack", "declared")
    }
    assert counts == {"missed": "1", "slack": "1", "declared": "0"}


def test_without_gateways_every_value_is_unknown(aggregated: Aggregated) -> None:
    aggregated.set_gateways()
    eventually("503", lambda: read_value(aggregated, "qwen"))


def test_a_draining_gateway_is_counted(aggregated: Aggregated, start_gateway: StartGateway) -> None:
    draining = start_gateway({"default/drained": build_demand(6)})
    aggregated.set_gateways(draining, ready=True, serving=False, terminating=True)
    eventually("6", lambda: read_value(aggregated, "drained"))


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ({"name": "absent"}, "no gateway knows an InferenceService default/absent"),
        ({"name": "*"}, "no gateway knows an InferenceService"),
        ({"name": "qwen", "namespace": "elsewhere"}, "no gateway knows an InferenceService elsewhere/qwen"),
        ({"name": "qwen", "metric": "tokens"}, "no metric tokens; the metrics are inference_in_flight, inf"),
        ({"name": "qwen", "query": "?metricLabelSelector=a%3Db"}, "the only label of metrics is gateways=Readable"),
        ({"name": "qwen", "metric": "inference_class_queued"}, "need the label request_class=NAME"),
        ({"name": "qwen", "metric": "inference_class_queued", "query": OF_CHAT}, "qwen has no request class chat"),
        ({"name": "qwen", "metric": "inference_limited_engines"}, "needs the label limit_reason=REASON: declared, pre"),
        ({"name": "qwen", "metric": "inference_limited_engines", "query": OF_REASON + "bad"}, "needs the label limit_"),
    ],
    ids=["service", "star", "namespace", "metric", "labels", "no class", "other class", "no reason", "other reason"],
)
def test_what_does_not_exist_is_404_and_named(
    aggregated: Aggregated, start_gateway: StartGateway, question: dict[str, str], sentence: str
) -> None:
    aggregated.set_gateways(start_gateway({"default/qwen": build_demand(1)}))
    eventually("1", lambda: read_value(aggregated, "qwen"))
    with pytest.raises(ApiError, match=sentence) as refused:
        aggregated.value(**question)
    assert refused.value.code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/apis/custom.metrics.k8s.io/v1beta2/namespaces/default/pods/*/inference_in_flight",
        "/apis/custom.metrics.k8s.io/v1beta2/namespaces/default/metrics/inference_in_flight",
        "/apis/custom.metrics.k8s.io/v1beta2/nodes/*/inference_in_flight",
        "/apis/custom.metrics.k8s.io/v1beta2/namespaces/default/inferenceservices.kserve.io/qwen/inference_in_flight",
        "/apis/custom.metrics.k8s.io/v1beta1/nothing",
    ],
)
def test_resources_that_are_not_ours_are_404(aggregated: Aggregated, path: str) -> None:
    with pytest.raises(ApiError, match='"reason": "NotFound"') as refused:
        aggregated.api.get(path)
    assert refused.value.code == 404


def test_values_cannot_be_written(aggregated: Aggregated) -> None:
    path = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/default/inferenceservices.conveyor.dev/qwen/"
    with pytest.raises(ApiError, match="MethodNotAllowed") as refused:
        aggregated.api.create(path + METRICS[0], {})
    assert refused.value.code == 405


def test_a_user_without_the_right_to_a_metric_is_refused_by_the_api_server(aggregated: Aggregated) -> None:
    """The API server authorizes a request before it forwards it, so this server need not check it again."""
    stranger = aggregated.plane.issue_kubeconfig("stranger", "stranger")
    command = [binary("kubectl"), "--kubeconfig", stranger, "get", "--raw"]
    path = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/default/inferenceservices.conveyor.dev/qwen/"
    done = subprocess.run([*command, path + METRICS[0]], capture_output=True, text=True)
    assert done.returncode != 0
    assert "Forbidden" in done.stderr


def test_discovery_of_the_api_server_prefers_v1beta2(aggregated: Aggregated) -> None:
    groups = {group["name"]: group for group in aggregated.api.get("/apis")["groups"]}
    assert groups["custom.metrics.k8s.io"]["preferredVersion"]["version"] == "v1beta2"
    for version in METRICS_VERSIONS:
        resources = aggregated.api.get(f"/apis/custom.metrics.k8s.io/{version}")["resources"]
        assert [resource["name"] for resource in resources] == [
            f"inferenceservices.conveyor.dev/{metric}" for metric in (*METRICS, *COUNTS, *OF_CLASSES, *OF_LIMITS)
        ]


def test_requests_for_a_starting_engine_are_left_out_of_the_metrics_and_not_of_the_counts(
    aggregated: Aggregated, start_gateway: StartGateway
) -> None:
    """Two gateways hold four requests, which fit the batch of the engine that both see starting."""
    seen = {"batch_size": 4, "replicas": {"ready": 0, "starting": 1, "desired": 1}}
    targets = {"targets": {"in_flight": 3.0, "queue_depth": 1.0}}
    gateways = [start_gateway({"default/qwen": build_demand(each, each) | seen | targets}) for each in (3, 1)]
    aggregated.set_gateways(*gateways)
    eventually("4", lambda: read_value(aggregated, "qwen", "inference_requests"))
    values = [read_value(aggregated, "qwen", metric) for metric in (*METRICS, *COUNTS)]
    assert values == ["3", "0", "4", "4"]


def test_aggregated_discovery_of_the_api_server_is_complete(aggregated: Aggregated) -> None:
    """kubectl and controllers read all APIs at once. An API that cannot be discovered is marked as stale there."""
    command = [binary("kubectl"), "--kubeconfig", aggregated.plane.kubeconfig, "api-resources", "--cached=false"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# At the port itself: callers that are not the API server.


def send(aggregated: Aggregated, path: str, pair: KeyPair | None, **headers: str) -> tuple[int, Json]:
    context = ssl.create_default_context(cafile=str(aggregated.authority.certificate))
    context.check_hostname = False  # its name is that of the Service
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    url = f"https://127.0.0.1:{aggregated.port}{path}"
    request = urllib.request.Request(url, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


PATHS = ("/apis", "/apis/custom.metrics.k8s.io", "/openapi/v2", "/openapi/v3", "/apis/custom.metrics.k8s.io/v1beta2")


@pytest.mark.parametrize("path", PATHS)
def test_the_front_proxy_of_the_real_api_server_is_answered(aggregated: Aggregated, path: str) -> None:
    code, _ = send(aggregated, path, aggregated.plane.front_proxy, **{"X-Remote-User": "system:kube-aggregator"})
    assert code == 200


@pytest.mark.parametrize("path", [*PATHS, "/", "/nothing"])
def test_without_a_certificate_every_path_is_401(aggregated: Aggregated, path: str) -> None:
    code, status = send(aggregated, path, None, **{"X-Remote-User": "system:admin", "X-Remote-Group": "system:masters"})
    assert (code, status["kind"], status["reason"]) == (401, "Status", "Unauthorized")


def test_a_certificate_of_the_cluster_authority_is_refused(aggregated: Aggregated) -> None:
    """The authority of users and kubelets is not the authority of the front proxy."""
    pair = aggregated.plane.authority.issue("imposter", "front-proxy-client")
    with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
        send(aggregated, "/apis", pair, **{"X-Remote-User": "system:admin"})


def find_code(aggregated: Aggregated, pair: KeyPair) -> int:
    """Return the status on a new connection; 0 if the handshake fails."""
    try:
        return send(aggregated, "/apis", pair, **{"X-Remote-User": "system:kube-aggregator"})[0]
    except (urllib.error.URLError, ConnectionError, ssl.SSLError):
        return 0


def test_a_serving_certificate_that_has_expired_is_replaced_without_a_restart(aggregated: Aggregated) -> None:
    read = partial(find_code, aggregated, aggregated.plane.front_proxy)
    write_serving_certificate(aggregated.authority, aggregated.folder, timedelta(seconds=-1))
    eventually(0, read)
    write_serving_certificate(aggregated.authority, aggregated.folder)
    eventually(200, read)


def test_a_rotated_front_proxy_authority_is_read_from_the_config_map(aggregated: Aggregated, tmp_path: Any) -> None:
    """Kubernetes rotates it in two steps: first both authorities are published, and then the old one is removed."""
    path = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
    old = aggregated.api.get(path)["data"]["requestheader-client-ca-file"]
    new = Authority(tmp_path, "new-front-proxy-authority")
    pair = new.issue("new-front-proxy", "front-proxy-client")

    def publish(bundle: str) -> None:
        operation = {"op": "replace", "path": "/data/requestheader-client-ca-file", "value": bundle}
        aggregated.api.patch_json(path, [operation])

    code = partial(find_code, aggregated)
    assert code(pair) == 0
    publish(old + new.certificate.read_text())
    eventually(200, lambda: code(pair))
    assert code(aggregated.plane.front_proxy) == 200
    publish(old)
    eventually(0, lambda: code(pair))
    assert code(aggregated.plane.front_proxy) == 200


# The plain page, at the port itself.


def read_page(aggregated: Aggregated, query: str) -> tuple[int, Json]:
    url = f"http://127.0.0.1:{aggregated.admin_port}/demand{query}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_the_page_has_both_sums_and_is_an_error_where_the_api_has_one(
    aggregated: Aggregated, start_gateway: StartGateway
) -> None:
    one, two = start_gateway({"default/qwen": build_demand(40, 8)}), start_gateway({"default/qwen": build_demand(2, 1)})
    aggregated.set_gateways(one, two)
    whole = {"inference_in_flight": 42, "inference_queue_depth": 9}
    eventually((200, whole), lambda: read_page(aggregated, "?service=default/qwen"))
    two.status = 503
    code, refused = read_page(aggregated, "?service=default/qwen")
    assert (code, refused["reason"]) == (503, "ServiceUnavailable")
    assert "the sum over the gateways is not known" in refused["message"]
    part = {"inference_in_flight": 40, "inference_queue_depth": 8}
    assert read_page(aggregated, "?service=default/qwen&gateways=Readable") == (200, part)


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("?service=default/absent", "no gateway knows an InferenceService default/absent"),
        ("", "with ?service=<namespace>/<name>"),
        ("?service=qwen", "with ?service=<namespace>/<name>"),
        ("?service=default/qwen&gateways=All", "the only label of metrics is gateways=Readable"),
    ],
)
def test_the_page_of_what_is_not_there_is_404(
    aggregated: Aggregated, start_gateway: StartGateway, query: str, sentence: str
) -> None:
    aggregated.set_gateways(start_gateway({"default/qwen": build_demand(1)}))
    eventually(200, lambda: read_page(aggregated, "?service=default/qwen")[0])
    code, status = read_page(aggregated, query)
    assert (code, status["kind"]) == (404, "Status")
    assert sentence in status["message"]
