"""Tests the chart's version, its default values, and the error for each wrong value."""

import re
import tomllib

import jsonschema
import pytest
import yaml
from tests.chart.installation import CHART, PARSERS, HelmFailed, helm, pods_of, render

from e2e.cluster.paths import REPOSITORY


def test_helm_finds_nothing_to_complain_about() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)


def test_the_chart_installs_the_version_of_this_repository() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == project["version"]


def test_the_schema_knows_exactly_the_values_that_there_are() -> None:
    """Every value has a type in the schema, and every property of the schema has a default with a comment."""
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)

    def compare(schema: dict, values: dict, path: str) -> None:  # type: ignore[type-arg]
        assert schema["properties"].keys() == values.keys(), path
        for key in values.keys() - {"global"}:  # other charts have keys of their own there
            if "properties" in schema["properties"][key]:
                assert schema["properties"][key]["additionalProperties"] is False, f"{path}.{key}"
                compare(schema["properties"][key], values[key], f"{path}.{key}")

    compare(schema, values, "values")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("gateway.replica=3", "additional properties 'replica' not allowed"),
        ("gatway.replicas=3", "additional properties 'gatway' not allowed"),
        ("image.registry=example.com", "additional properties 'registry' not allowed"),
        ("operator.replicas=0", "at '/operator/replicas': minimum: got 0, want 1"),
        ("userId=0", "at '/userId': minimum: got 0, want 1"),
        ("gateway.replicas=0", "at '/gateway/replicas': minimum: got 0, want 1"),
        ("metrics.replicas=two", "at '/metrics/replicas': got string, want integer"),
        ("image.pullPolicy=Sometimes", "value must be one of 'Always', 'IfNotPresent', 'Never'"),
        ("image.tag=a b", "'a b' does not match pattern"),
        ("image.repository=", "at '/image/repository': minLength: got 0, want 1"),
        ("operator.logLevel=loud", "value must be one of 'debug', 'info', 'warning', 'error'"),
        ("crds.create=yes please", "at '/crds/create': got string, want boolean"),
        ("metrics.apiService.create=false", "additional properties 'apiService' not allowed"),
        ("gateway.service.type=ExternalName", "value must be one of 'ClusterIP', 'NodePort', 'LoadBalancer'"),
        ("gateway.service.nodePort=http", "at '/gateway/service/nodePort': got string, want"),
        ("gateway.service.nodePort=65536", "maximum: got 65,536, want 65,535"),
        ("gateway.drainTimeoutSeconds=0", "minimum: got 0, want 1"),
        ("gateway.drainTimeoutSeconds=86401", "maximum: got 86,401, want 86,400"),
        ("gateway.url=inference.example.com", "'inference.example.com' does not match pattern"),
        ("gateway.url=https://a.example/", "'https://a.example/' does not match pattern"),
        ("gateway.publicHosts[0]=https://a", "'https://a' does not match pattern"),
        ("gateway.trustedProxies[0]=10.0.0.1", "'10.0.0.1' does not match pattern"),
        ("gateway.clientHeader=X-Client", "gateway.clientHeader needs gateway.trustedProxies"),
        ("gateway.cors.allowedOrigins[0]=chat.example.com", "'chat.example.com' does not match pattern"),
        ("watchNamespaces[0]=Team A", "'Team A' does not match pattern"),
        ("watchNamespaces[0]=team.a", "'team.a' does not match pattern"),
        (f"watchNamespaces[0]={'a' * 64}", "at '/watchNamespaces/0': maxLength: got 64, want 63"),
        ("watchNamespaces={a,a}", "items at 0 and 1 are equal"),
        ("clusterDomain=.local", "'.local' does not match pattern"),
        ("imagePullSecrets[0]=secret", "at '/imagePullSecrets/0': got string, want object"),
        ("imagePullSecrets[0].name=My_Registry", "'My_Registry' does not match pattern"),
        ("gateway.resources.memory=1Gi", "additional properties 'memory' not allowed"),
        ("gateway.extraArgs[0]=port", "'port' does not match pattern"),
        ("imageRegistry=https://registry.example.com", "'https://registry.example.com' does not match pattern"),
        ("image.digest=sha256:12", "'sha256:12' does not match pattern"),
        ("operator.env[0]=A=1", "at '/operator/env/0': got string, want object"),
        ("operator.volumes[0].emptyDir.medium=Memory", "at '/operator/volumes/0': missing property 'name'"),
        ("gateway.podAnnotations.a=1", "at '/gateway/podAnnotations/a': got number, want string"),
        ("metrics.podLabels.a=b c", "'b c' does not match pattern"),
        ("gateway.hostNetwork=true", "additional properties 'hostNetwork' not allowed"),
        ("metrics.adminPort=80", "at '/metrics/adminPort': minimum: got 80, want 1,024"),
        ("metrics.serviceAccount.name=My_Account", "'My_Account' does not match pattern"),
        ("metrics.serviceAccount.token=x", "additional properties 'token' not allowed"),
        ("gateway.service.loadBalancerSourceRanges={203.0.113.1}", "'203.0.113.1' does not match pattern"),
        ("prometheusRules.runbookUrl=docs/alerts.md", "'docs/alerts.md' does not match pattern"),
        ("podMonitors.interval=30", "at '/podMonitors/interval': got number, want string"),
        ("gateway.service.spec.selector.a=b", "'selector'"),
        ("global.imageRegistry=https://registry.example.com", "'https://registry.example.com' does not match pattern"),
        ("traces.endpoint=collector:4318", "'collector:4318' does not match pattern"),
        ("console.prometheus.url=http://me:secret@prometheus:9090", "does not match pattern"),
        ("traces.ratio=2", "at '/traces/ratio': maximum: got 2, want 1"),
        ("podMonitor.create=true", "additional properties 'podMonitor' not allowed"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place_and_what_it_may_be(value: str, sentence: str) -> None:
    with pytest.raises(HelmFailed) as refused:
        render(value)
    assert sentence in str(refused.value)


def test_the_largest_values_reach_programs_that_take_them() -> None:
    namespace, secret = "a" * 63, "registry.example.com-" + "a" * 232
    values = (f"watchNamespaces[0]={namespace}", f"imagePullSecrets[0].name={secret}")
    for name, spec in pods_of(render("gateway.drainTimeoutSeconds=86400", *values)).items():
        assert spec["imagePullSecrets"] == [{"name": secret}]
        PARSERS[name](spec["containers"][0]["args"], {})


def test_values_of_an_umbrella_chart_fill_what_the_chart_s_own_leave_open() -> None:
    umbrella = ("global.imageRegistry=mirror.example.com", "global.imagePullSecrets={a}", "global.other.key=1")
    for spec in pods_of(render(*umbrella)).values():
        assert spec["containers"][0]["image"].startswith("mirror.example.com/conveyor/control:")
        assert spec["imagePullSecrets"] == [{"name": "a"}]
    own = ("imageRegistry=own.example.com", "imagePullSecrets[0].name=b", "global.imagePullSecrets[0].name=a")
    for spec in pods_of(render(*umbrella[:1], *own)).values():
        assert spec["containers"][0]["image"].startswith("own.example.com/")
        assert spec["imagePullSecrets"] == [{"name": "b"}]


def test_the_quickstart_s_registry_reaches_the_pods_and_the_engines() -> None:
    given = re.search("`--set (image.repository=[^`]*)`", (REPOSITORY / "docs/install.md").read_text())
    assert given
    pods = pods_of(render(given[1]))
    images = {spec["containers"][0]["image"].rpartition(":")[0] for spec in pods.values()}
    assert images == {"registry.example.com/conveyor/control"}
    engine = [arg for arg in pods["conveyor-operator"]["containers"][0]["args"] if arg.startswith("--engine-image=")]
    assert engine[0].startswith("--engine-image=registry.example.com/conveyor/engine:")
