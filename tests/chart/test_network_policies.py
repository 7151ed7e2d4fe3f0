"""Tests which pods may reach which ports of the chart's pods by its NetworkPolicies. No plug-in enforces them here."""

from ipaddress import ip_address, ip_network

import pytest
import yaml
from tests.chart.installation import Json, find, render, render_json

from conveyor_api import names
from e2e.cluster.paths import REPOSITORY

OPERATOR_PODS, METRICS_PODS, CONSOLE_PODS = (
    {"podSelector": {"matchLabels": {names.NAME_LABEL: f"conveyor-{process}", names.INSTANCE_LABEL: "conveyor"}}}
    for process in ("operator", "metrics", "console")
)
PROMETHEUS, KEDA = (
    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}} for name in ("monitoring", "keda")
)
ANYBODY = None
# Who may reach which port of which process; the kubelet's probes are let in by Kubernetes itself.
DOORS: dict[str, dict[int, list[Json] | None]] = {
    "conveyor-gateway": {
        names.GATEWAY_PORT: ANYBODY,
        names.GATEWAY_ADMIN_PORT: [OPERATOR_PODS, METRICS_PODS, CONSOLE_PODS, PROMETHEUS],
    },
    "conveyor-metrics": {names.METRICS_PORT: ANYBODY, names.METRICS_ADMIN_PORT: [PROMETHEUS, KEDA]},
    "conveyor-console": {names.CONSOLE_PORT: []},
    "conveyor-operator": {names.OPERATOR_ADMIN_PORT: [PROMETHEUS]},
}


@pytest.mark.parametrize("process", DOORS)
@pytest.mark.parametrize("prometheus", [True, False])
def test_a_process_lets_in_who_needs_it_and_nobody_else(process: str, prometheus: bool) -> None:
    values = ["networkPolicies.prometheusNamespaces={monitoring}"] if prometheus else []
    objects = render("console.enabled=true", *values)
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


def test_what_a_policy_selects_by_are_labels_of_the_pods_that_are_meant() -> None:
    """Engines' policies select the gateways by labels, and the gateways' policy selects the programs that read them."""
    rendered = render("console.enabled=true")
    gateway = find(rendered, "Deployment", "conveyor-gateway")["spec"]["template"]["metadata"]["labels"]
    assert names.GATEWAY_POD_LABELS.items() <= gateway.items()
    for process, peer in (("operator", OPERATOR_PODS), ("metrics", METRICS_PODS), ("console", CONSOLE_PODS)):
        labels = find(rendered, "Deployment", f"conveyor-{process}")["spec"]["template"]["metadata"]["labels"]
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()


def test_only_the_namespaces_of_the_consoles_proxy_may_connect_to_the_console() -> None:
    objects = render("console.enabled=true", "networkPolicies.consoleNamespaces={proxies}")
    (rule,) = find(objects, "NetworkPolicy", "conveyor-console")["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": names.CONSOLE_PORT}]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "proxies"}}}]


def test_without_a_metrics_server_the_operator_alone_queries_the_gateways() -> None:
    policy = find(render("metrics.enabled=false"), "NetworkPolicy", "conveyor-gateway")["spec"]
    (admin,) = [rule for rule in policy["ingress"] if rule["ports"][0]["port"] == names.GATEWAY_ADMIN_PORT]
    assert admin["from"] == [OPERATOR_PODS]


def test_keda_reads_a_port_of_the_service_that_leads_to_the_metrics_servers_admin_port() -> None:
    objects = render("metrics.adminPort=9091")
    (port,) = [each for each in find(objects, "Service", names.METRICS_SERVICE)["spec"]["ports"] if each["port"] != 443]
    assert names.metrics_url() == f"http://{names.METRICS_SERVICE}.conveyor-system.svc.cluster.local:{port['port']}"
    (container,) = find(objects, "Deployment", "conveyor-metrics")["spec"]["template"]["spec"]["containers"]
    assert {"name": port["targetPort"], "containerPort": 9091} in container["ports"]


def is_let_in(peer: Json, caller: Json) -> bool:
    """Return whether a peer of a NetworkPolicy in the release's namespace selects the caller."""
    if "ipBlock" in peer:
        return ip_address(caller["address"]) in ip_network(peer["ipBlock"]["cidr"])
    namespace: dict[str, str] = {"kubernetes.io/metadata.name": caller.get("namespace", "")}
    labels: dict[str, str] = caller.get("labels", {})
    of_namespace = peer.get("namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": "conveyor-system"}})
    of_pod = peer.get("podSelector", {"matchLabels": {}})
    assert {*of_namespace, *of_pod} == {"matchLabels"}, "the test knows no other selectors"
    return of_namespace["matchLabels"].items() <= namespace.items() and of_pod["matchLabels"].items() <= labels.items()


def may_connect(policies: list[Json], pod: dict[str, str], port: int, caller: Json) -> bool:
    """Return whether any of the policies that select the pod has a rule for the caller and the port."""
    rules = [
        rule
        for policy in policies
        if policy["spec"]["podSelector"]["matchLabels"].items() <= pod.items()
        for rule in policy["spec"]["ingress"]
        if any(each["port"] == port for each in rule["ports"])
    ]
    return any("from" not in rule or any(is_let_in(peer, caller) for peer in rule["from"]) for rule in rules)


def clients_let_in(objects: list[Json], *more: Json) -> set[str]:
    """Return which callers may send requests to the gateways."""
    test = find(objects, "Pod", "conveyor-test")["metadata"]
    callers: dict[str, Json] = {
        "proxy": {"namespace": "projectcontour", "address": "10.244.0.1"},
        "job": {"namespace": "team-b", "address": "10.244.0.2"},
        "stranger": {"namespace": "team-c", "address": "10.244.0.3"},
        "helm test": {"namespace": test["namespace"], "labels": test["labels"], "address": "10.244.0.4"},
        "proxy of a node": {"address": "192.0.2.7"},
        "stranger outside": {"address": "198.51.100.7"},
    }
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    pod = find(objects, "Deployment", "conveyor-gateway")["spec"]["template"]["metadata"]["labels"]
    return {
        name for name, caller in callers.items() if may_connect([*policies, *more], pod, names.GATEWAY_PORT, caller)
    }


def test_by_default_everybody_may_send_requests(rendered: list[Json]) -> None:
    assert len(clients_let_in(rendered)) == 6


def test_the_pages_policies_let_in_the_proxy_and_the_clients_and_nobody_else() -> None:
    page = (REPOSITORY / "docs/expose.md").read_text().partition("## Close the port behind the proxy")[2]
    values, policy = (yaml.safe_load(block.partition("```")[0]) for block in page.split("```yaml\n")[1:3])
    objects = render_json(**values)
    assert clients_let_in(objects) == {"proxy", "job", "helm test"}
    assert clients_let_in(objects, policy) == {"proxy", "job", "helm test", "proxy of a node"}


def test_the_consoles_playground_may_send_requests_beside_named_clients() -> None:
    objects = render("console.enabled=true", "console.playground=true", "networkPolicies.clientNamespaces={team-b}")
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    gateway, console = (find(objects, "Deployment", f"conveyor-{name}") for name in ("gateway", "console"))
    labels = console["spec"]["template"]["metadata"]["labels"]
    caller = {"namespace": console["metadata"]["namespace"], "labels": labels, "address": "10.244.0.5"}
    pod = gateway["spec"]["template"]["metadata"]["labels"]
    assert may_connect(policies, pod, names.GATEWAY_PORT, caller)
    assert not may_connect(policies, pod, names.GATEWAY_PORT, {**caller, "namespace": "team-c"})


def test_the_namespaces_of_clients_reach_no_other_port() -> None:
    policies = [find(render(f"networkPolicies.clientNamespaces={{{name}}}"), "NetworkPolicy", "conveyor-gateway")
                for name in ("team-b", "conveyor-system")]  # fmt: skip
    job, own = ([rule.get("from") for rule in policy["spec"]["ingress"]] for policy in policies)
    assert job[1] == own[1] == [OPERATOR_PODS, METRICS_PODS]
    assert own[0] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "conveyor-system"}}}]


def test_a_namespace_may_look_like_a_number() -> None:
    objects = render_json(networkPolicies={"clientNamespaces": ["42"]})
    rule = find(objects, "NetworkPolicy", "conveyor-gateway")["spec"]["ingress"][0]
    assert rule["from"][1]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "42"}
