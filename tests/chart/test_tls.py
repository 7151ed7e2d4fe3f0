"""Tests the chart with a gateway that serves TLS."""

import pytest
from tests.chart.installation import CHART, HelmFailed, find, helm, render

from conveyor_api import names

SECRET = "gateway.tls.secretName=gateway-tls"
URL = "https://conveyor-gateway.conveyor-system.svc.cluster.local"


def test_the_gateway_serves_with_the_secret_on_the_port_of_https() -> None:
    objects = render(SECRET)
    pod = find(objects, "Deployment", "conveyor-gateway")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "--tls-folder=/etc/conveyor/tls" in container["args"]
    assert {"name": "tls", "mountPath": "/etc/conveyor/tls", "readOnly": True} in container["volumeMounts"]
    assert {"name": "tls", "secret": {"secretName": "gateway-tls"}} in pod["volumes"]
    assert container["readinessProbe"]["httpGet"]["port"] == "admin"  # which stays plain HTTP
    (port,) = find(objects, "Service", "conveyor-gateway")["spec"]["ports"]
    assert port == {"name": "https", "port": 443, "targetPort": "http"}


@pytest.mark.parametrize(("given", "requested"), [("", "346Mi"), ("512Mi", "602Mi"), ("1Gi", "1Gi")])
def test_the_gateway_requests_more_memory_for_its_connections(given: str, requested: str) -> None:
    objects = render(SECRET, *([f"gateway.resources.requests.memory={given}"] if given else []))
    (container,) = find(objects, "Deployment", "conveyor-gateway")["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["memory"] == requested


def test_statuses_and_the_test_of_the_release_have_its_url() -> None:
    objects = render(SECRET)
    (operator,) = find(objects, "Deployment", "conveyor-operator")["spec"]["template"]["spec"]["containers"]
    assert f"--gateway-url={URL}" in operator["args"]
    test = find(objects, "Pod", "conveyor-test")["spec"]
    args = test["containers"][0]["args"]
    assert {f"--gateway-url={URL}", "--gateway-authorities=/etc/conveyor/tls/ca.crt"} <= set(args)
    items = [{"key": "ca.crt", "path": "ca.crt"}]  # it needs no private key, and starts without an authority
    assert {"name": "tls", "secret": {"secretName": "gateway-tls", "items": items, "optional": True}} in test["volumes"]


def test_the_console_tries_services_through_the_gateway_if_it_may() -> None:
    def find_flags(*values: str) -> tuple[list[str], bool]:
        console = find(render("console.enabled=true", *values), "Deployment", "conveyor-console")
        spec = console["spec"]["template"]["spec"]
        flags = [each for each in spec["containers"][0]["args"] if each.startswith("--playground")]
        return flags, any(each["name"] == "tls" for each in spec["volumes"])

    assert find_flags() == find_flags(SECRET) == ([], False)
    plain = "--playground-url=http://conveyor-gateway.conveyor-system.svc.cluster.local"
    assert find_flags("console.playground=true") == ([plain], False)
    authorities = "--playground-authorities=/etc/conveyor/tls/ca.crt"
    assert find_flags("console.playground=true", SECRET) == ([f"--playground-url={URL}", authorities], True)


def test_a_url_for_clients_takes_precedence() -> None:
    objects = render(SECRET, "gateway.url=https://inference.example.com")
    (operator,) = find(objects, "Deployment", "conveyor-operator")["spec"]["template"]["spec"]["containers"]
    assert "--gateway-url=https://inference.example.com" in operator["args"]


def test_without_the_secret_nothing_is_about_tls() -> None:
    assert "tls" not in helm("template", "conveyor", CHART, "--show-only=templates/gateway/deployment.yaml")


def test_engines_serve_tls_with_a_secret_of_each_namespace() -> None:
    objects = render(SECRET, "engine.tls.secretName=engine-tls", "podMonitors.create=true")
    (operator,) = find(objects, "Deployment", "conveyor-operator")["spec"]["template"]["spec"]["containers"]
    (gateway,) = find(objects, "Deployment", "conveyor-gateway")["spec"]["template"]["spec"]["containers"]
    assert "--engine-tls-secret=engine-tls" in operator["args"]
    assert "--engine-authorities=/etc/conveyor/tls/ca.crt" in gateway["args"]
    (endpoint,) = find(objects, "PodMonitor", "conveyor-engine")["spec"]["podMetricsEndpoints"]
    assert (endpoint["scheme"], endpoint["port"]) == ("https", names.ENGINE_TLS_PORT_NAME)


def test_engines_with_tls_need_authorities_that_verify_them() -> None:
    with pytest.raises(HelmFailed, match=r"needs gateway\.tls\.secretName: its ca\.crt verifies the engines"):
        render("engine.tls.secretName=engine-tls")
