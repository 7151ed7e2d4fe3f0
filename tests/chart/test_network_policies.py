"""Tests which pods may reach which ports of the chart's pods by its NetworkPolicies. No plug-in enforces them here."""

import pytest
from tests.chart.installation import Json, find, render

from conveyor_api import names

OPERATOR_PODS, METRICS_PODS = (
    {"podSelector": {"matchLabels": {names.NAME_LABEL: f"conveyor-{process}", names.INSTANCE_LABEL: "conveyor"}}}
    for process in ("operator", "metrics")
)
PROMETHEUS, KEDA = (
    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}} for name in ("monitoring", "keda")
)
ANYBODY = None
# Who may reach which port of which process; the kubelet's probes are let in by Kubernetes itself.
DOORS: dict[str, dict[int, list[Json] | None]] = {
    "conveyor-gateway": {
        names.GATEWAY_PORT: ANYBODY,
        names.GATEWAY_ADMIN_PORT: [OPERATOR_PODS, METRICS_PODS, PROMETHEUS],
    },
    "conveyor-metrics": {names.METRICS_PORT: ANYBODY, names.METRICS_ADMIN_PORT: [PROMETHEUS, KEDA]},
    "conveyor-operator": {names.OPERATOR_ADMIN_PORT: [PROMETHEUS]},
}


@pytest.mark.parametrize("process", DOORS)
@pytest.mark.parametrize("prometheus", [True, False])
def test_a_process_lets_in_who_needs_it_and_nobody_else(process: str, prometheus: bool) -> None:
    objects = render(*(["networkPolicies.prometheusNamespaces={monitoring}"] if prometheus else []))
    policy = find(objects, "NetworkPolicy", process)["spec"]
    template = find(objects, "Deployment", process)["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    doors = {port["port"]: rule.get("from") for rule in policy["ingress"] for port in rule["ports"]}
    expected = {
        port: peers if prometheus or peers is ANYBODY else [peer for peer in peers if peer != PROMETHEUS]
        for port, peers in DOORS[process].items()
    }
    assert doors == {port: peers for port, peers in expected.items() if peers != []}
    listened = {port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert doors.keys() <= listened == DOORS[process].keys()


def test_what_a_policy_selects_by_are_labels_of_the_pods_that_are_meant(rendered: list[Json]) -> None:
    """Engines' policies select the gateways by labels, and the gateways' policy selects operator and metrics server."""
    gateway = find(rendered, "Deployment", "conveyor-gateway")["spec"]["template"]["metadata"]["labels"]
    assert names.GATEWAY_POD_LABELS.items() <= gateway.items()
    for process, peer in (("operator", OPERATOR_PODS), ("metrics", METRICS_PODS)):
        labels = find(rendered, "Deployment", f"conveyor-{process}")["spec"]["template"]["metadata"]["labels"]
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()


def test_without_a_metrics_server_the_operator_alone_asks_the_gateways() -> None:
    policy = find(render("metrics.enabled=false"), "NetworkPolicy", "conveyor-gateway")["spec"]
    (admin,) = [rule for rule in policy["ingress"] if rule["ports"][0]["port"] == names.GATEWAY_ADMIN_PORT]
    assert admin["from"] == [OPERATOR_PODS]


def test_keda_asks_at_a_port_of_the_service_that_leads_to_the_metrics_servers_admin_port() -> None:
    objects = render("metrics.adminPort=9091")
    (port,) = [each for each in find(objects, "Service", names.METRICS_SERVICE)["spec"]["ports"] if each["port"] != 443]
    assert names.metrics_url() == f"http://{names.METRICS_SERVICE}.conveyor-system.svc.cluster.local:{port['port']}"
    (container,) = find(objects, "Deployment", "conveyor-metrics")["spec"]["template"]["spec"]["containers"]
    assert {"name": port["targetPort"], "containerPort": 9091} in container["ports"]
