"""Tests that values for a part's pods reach only these pods, and that every value of the chart has an effect."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from tests.chart.installation import (
    CHART,
    PROCESSES,
    HelmFailed,
    Json,
    dry_run,
    find,
    pods_of,
    render,
    render_json,
)

from conveyor_api import names
from e2e.cluster.api import Api


@dataclass(frozen=True)
class Passed:
    """A value of a part, its place in the rendered objects, and the expected content of that place."""

    value: Any
    look: Callable[[Json], Any]
    found: Any = None

    def is_in(self, deployment: Json) -> bool:
        """Return whether `found` is or contains the value. A map or list may have other entries too."""
        default = self.value if self.found is None else self.found
        there = self.look(deployment)
        if isinstance(default, dict):
            return bool(default.items() <= (there or {}).items())
        if isinstance(default, list):
            return all(item in (there or []) for item in default)
        return bool(there == default)


def pod(deployment: Json) -> Json:
    return dict(deployment["spec"]["template"]["spec"])


def container(deployment: Json) -> Json:
    return dict(pod(deployment)["containers"][0])


def pod_marks(deployment: Json) -> Json:
    return dict(deployment["spec"]["template"]["metadata"])


TOLERATION = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
TERM = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}
AFFINITY = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [TERM]}}}
LEAST_HOST = {"type": "Localhost", "localhostProfile": "profiles/conveyor.json"}
ZONES = {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
EVICTABLE = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
OF_ALL = {**ZONES, "labelSelector": {"matchLabels": {"team": "a"}}}

PASSED: dict[str, Passed] = {
    "labels": Passed({"example.com/team": "a"}, lambda d: d["metadata"]["labels"]),
    "annotations": Passed({"example.com/owner": "a b"}, lambda d: d["metadata"]["annotations"]),
    "podLabels": Passed({"example.com/mesh": "on"}, lambda d: pod_marks(d)["labels"]),
    "podAnnotations": Passed({"example.com/inject": "true"}, lambda d: pod_marks(d).get("annotations")),
    "env": Passed([{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}], lambda d: container(d).get("env")),
    "envFrom": Passed([{"configMapRef": {"name": "proxy"}}], lambda d: container(d).get("envFrom")),
    "volumes": Passed([{"name": "ca", "configMap": {"name": "ca"}}], lambda d: pod(d)["volumes"]),
    "volumeMounts": Passed([{"name": "ca", "mountPath": "/etc/ca"}], lambda d: container(d)["volumeMounts"]),
    "podSecurityContext": Passed({"seccompProfile": LEAST_HOST, "fsGroup": 7}, lambda d: pod(d)["securityContext"]),
    "securityContext": Passed({"readOnlyRootFilesystem": False}, lambda d: container(d)["securityContext"]),
    "serviceAccount": Passed({"name": "given"}, lambda d: pod(d)["serviceAccountName"], "given"),
    "topologySpreadConstraints": Passed([OF_ALL], lambda d: pod(d)["topologySpreadConstraints"]),
    "nodeSelector": Passed({"disk": "fast"}, lambda d: pod(d).get("nodeSelector")),
    "tolerations": Passed([TOLERATION], lambda d: pod(d).get("tolerations")),
    "affinity": Passed(AFFINITY, lambda d: pod(d).get("affinity")),
    "priorityClassName": Passed("system-cluster-critical", lambda d: pod(d).get("priorityClassName")),
    "resources": Passed(
        {"limits": {"memory": "3Gi"}}, lambda d: container(d)["resources"]["limits"], {"memory": "3Gi"}
    ),
    "extraArgs": Passed(["--log-format=json"], lambda d: container(d)["args"]),
    "logLevel": Passed("debug", lambda d: [a for a in container(d)["args"] if "level" in a], ["--log-level=debug"]),
}
# What else a part takes, each with a test of its own here or in another file of this folder, and a value for it.
OWN: dict[str, Json] = {
    "operator": {"replicas": 7, "unservedNameDays": 3},
    "gateway": {
        "replicas": 7,
        "autoscaling": {"enabled": True},
        "url": "https://inference.example.com",
        "publicHosts": ["inference.example"],
        "trustedProxies": ["10.244.0.0/16"],
        "clientHeader": "X-Client",
        "cors": {"allowedOrigins": ["https://chat.example.com"]},
        "rootModels": "All",
        "access": "Required",
        "limits": {"namespaces": {"*": {"tokensPerDay": 5_000_000}}},
        "drainTimeoutSeconds": 30,
        "tls": {"secretName": "gateway-tls"},
        "service": {"spec": {"externalTrafficPolicy": "Local"}},
    },
    "console": {
        "enabled": True,
        "playground": True,
        "prometheus": {"url": "http://prometheus.monitoring:9090"},
    },
    "metrics": {"enabled": False, "replicas": 7, "hostNetwork": True, "httpsPort": 10251, "adminPort": 18081},
}
WHOLE: Json = {
    "global": {"imageRegistry": "registry.example.com"},
    "imageRegistry": "registry.example.com",
    "image": {"tag": "v9"},
    "imagePullSecrets": [{"name": "registry"}],
    "engine": {"image": {"tag": "v9"}},
    "commonLabels": {"cost-center": "42"},
    "userId": 1000,
    "profiles": {"l4": {}},
    "clusterDomain": "example.org",
    "watchNamespaces": ["team-a"],
    "userRoles": {"create": False},
    "priorityClass": {"create": False},
    "test": {"enabled": False},
    "admissionPolicy": {"create": False},
    "networkPolicies": {"create": False},
    "podMonitors": {"create": True},
    "prometheusRules": {"create": True},
    "dashboards": {"create": True},
    "traces": {"endpoint": "http://collector:4318"},
}
PARTS = (*PROCESSES, "console")
DEFAULTS: Json = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.fixture(scope="module")
def rendered() -> list[Json]:
    """The objects of the chart with its defaults and the console, without the CRD."""
    return render_parts()


def render_parts(**values: Any) -> list[Json]:
    return render_json(**{**values, "console": {"enabled": True, **values.get("console", {})}})


def test_every_value_has_a_row_here() -> None:
    assert DEFAULTS.keys() == WHOLE.keys() | {"crds"} | set(PARTS)
    for process in PARTS:
        assert DEFAULTS[process].keys() == PASSED.keys() | OWN[process].keys(), process


@pytest.mark.parametrize("value", WHOLE)
def test_every_value_of_the_whole_changes_what_is_rendered(rendered: list[Json], value: str) -> None:
    assert render_parts(**{value: WHOLE[value]}) != rendered


@pytest.mark.parametrize(("process", "value"), [(p, v) for p in PARTS for v in OWN[p]])
def test_every_value_of_one_part_changes_what_is_rendered(process: str, value: str) -> None:
    others: dict[str, Json] = {
        "hostNetwork": {"httpsPort": 10251},
        "clientHeader": {"trustedProxies": ["10.0.0.0/8"]},
        "playground": {"enabled": True},
        "prometheus": {"enabled": True},
    }
    more = others.get(value, {})
    assert render_json(**{process: {value: OWN[process][value], **more}}) != render_json(**{process: more})


@pytest.mark.parametrize("value", PASSED)
@pytest.mark.parametrize("process", PARTS)
def test_a_value_reaches_the_part_that_it_is_set_for_and_no_other(
    rendered: list[Json], process: str, value: str
) -> None:
    passed = PASSED[value]
    assert not is_there(passed, find(rendered, "Deployment", f"conveyor-{process}"))
    objects = render_parts(**{process: {value: passed.value}})
    assert is_there(passed, find(objects, "Deployment", f"conveyor-{process}"))
    for other in set(PARTS) - {process}:
        name = f"conveyor-{other}"
        assert find(objects, "Deployment", name) == find(rendered, "Deployment", name)


def is_there(passed: Passed, deployment: Json) -> bool:
    try:
        return passed.is_in(deployment)
    except KeyError:
        return False


@pytest.mark.slow
def test_the_api_server_takes_all_of_it_at_once(api: Api) -> None:
    everything = {name: passed.value for name, passed in PASSED.items()}
    values = {process: {**everything, **OWN[process]} for process in PARTS}
    values["metrics"]["enabled"] = True
    service = {
        "type": "LoadBalancer",
        "loadBalancerClass": "example.com/internal",
        "loadBalancerSourceRanges": ["203.0.113.0/24"],
        "spec": {"externalTrafficPolicy": "Local", "trafficDistribution": "PreferClose"},
    }
    values["gateway"]["service"] = service
    objects = render_json(commonLabels={"cost-center": "42"}, **values)
    flat = {key: value for key, value in service.items() if key != "spec"} | service["spec"]
    assert flat.items() <= find(objects, "Service", names.GATEWAY_SERVICE)["spec"].items()
    dry_run(api, objects)


def test_what_the_chart_makes_of_a_security_context_stays_beside_what_is_set() -> None:
    objects = render_json(
        gateway={"securityContext": {"readOnlyRootFilesystem": False}, "podSecurityContext": {"fsGroup": 7}}
    )
    spec = pods_of(objects)["conveyor-gateway"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": 7,
    }
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": False,
    }


def test_profiles_restart_the_operator_beside_annotations_of_others() -> None:
    objects = render_json(operator={"podAnnotations": {"a": "b"}}, profiles={"l4": {}})
    marks = pod_marks(find(objects, "Deployment", "conveyor-operator"))
    assert marks["annotations"].keys() == {"a", "conveyor.dev/profiles-hash", EVICTABLE}


@pytest.mark.parametrize("process", PARTS)
def test_the_cluster_autoscaler_may_remove_the_nodes_of_the_pods(process: str) -> None:
    """It looks for volumes on the node that this annotation does not name. `podAnnotations` can name others too."""
    more = {"volumes": [{"name": "more", "emptyDir": {}}], "podAnnotations": {EVICTABLE: "tmp,more"}}
    for values, expected in (({}, {"tmp"}), (more, {"tmp", "more"})):
        deployment = find(render_parts(**{process: values}), "Deployment", f"conveyor-{process}")
        local = {each["name"] for each in pod(deployment)["volumes"] if {"emptyDir", "hostPath"} & each.keys()}
        assert set(pod_marks(deployment)["annotations"][EVICTABLE].split(",")) == local == expected


@pytest.mark.parametrize("process", PARTS)
def test_a_spread_without_selector_is_about_the_part_s_own_pods(process: str) -> None:
    deployment = find(
        render_parts(**{process: {"topologySpreadConstraints": [ZONES]}}), "Deployment", f"conveyor-{process}"
    )
    selector = {"labelSelector": {"matchLabels": deployment["spec"]["selector"]["matchLabels"]}}
    assert pod(deployment)["topologySpreadConstraints"] == [{**ZONES, **selector}]


@pytest.mark.parametrize("process", PARTS)
def test_by_default_the_pods_of_a_rollout_are_spread_without_those_that_they_replace(process: str) -> None:
    (spread,) = pod(find(render_parts(), "Deployment", f"conveyor-{process}"))["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["matchLabelKeys"]) == ("kubernetes.io/hostname", ["pod-template-hash"])


def test_common_labels_are_on_every_object_but_the_crds_and_on_every_pod() -> None:
    objects = render_json(commonLabels={"cost-center": "42"}, podMonitors={"create": True})
    crds = [item for item in render() if item["kind"] == "CustomResourceDefinition"]
    assert len(crds) == 3
    assert not any("cost-center" in str(item["metadata"]) for item in crds)
    of_ours = [item for item in objects if item["kind"] != "CustomResourceDefinition"]
    pods = [item["spec"]["template"] for item in of_ours if item["kind"] == "Deployment"]
    assert len(pods) == 3
    for item in (*of_ours, *pods):
        assert item["metadata"]["labels"]["cost-center"] == "42", item["metadata"]


@pytest.mark.parametrize(
    "values",
    [
        "commonLabels.app\\.kubernetes\\.io/name=x",
        "metrics.podLabels.app\\.kubernetes\\.io/instance=x",
        "gateway.labels.helm\\.sh/chart=x",
    ],
)
def test_labels_that_the_chart_sets_itself_are_refused_by_name(values: str) -> None:
    with pytest.raises(HelmFailed, match=r"label (app.kubernetes.io|helm.sh)/\w+ is the chart's own"):
        render(values)


@pytest.mark.parametrize("process", PARTS)
@pytest.mark.parametrize("create", [True, False])
def test_an_account_is_made_or_another_one_gets_its_rights(process: str, create: bool) -> None:
    account = {"create": create, "name": "given", "annotations": {"iam.example.com/role": "r"}}
    objects = render_parts(**{process: {"serviceAccount": account}})
    made = [item for item in objects if item["kind"] == "ServiceAccount" and item["metadata"]["name"] == "given"]
    assert [item["metadata"]["annotations"] for item in made] == [account["annotations"]] * create
    assert f"conveyor-{process}" not in {i["metadata"]["name"] for i in objects if i["kind"] == "ServiceAccount"}
    subjects = [subject for item in objects for subject in item.get("subjects", ())]
    assert f"conveyor-{process}" not in {subject["name"] for subject in subjects}
    assert "given" in {subject["name"] for subject in subjects}


def test_pods_run_on_linux_with_a_class_of_their_own_and_reserve_disk(rendered: list[Json]) -> None:
    """So a full disk evicts them after the pods that have no class (docs/adr/0157)."""
    made = find(rendered, "PriorityClass", "conveyor")
    assert made["preemptionPolicy"] == "Never"
    for spec in pods_of(rendered).values():
        assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert spec["priorityClassName"] == made["metadata"]["name"]
        assert spec["containers"][0]["resources"]["requests"]["ephemeral-storage"] == "64Mi"
    without = render_json(priorityClass={"create": False})
    assert "PriorityClass" not in {item["kind"] for item in without}
    assert not any("priorityClassName" in spec for spec in pods_of(without).values())


def test_only_pods_that_ask_for_a_token_get_one(rendered: list[Json]) -> None:
    accounts = [item for item in rendered if item["kind"] == "ServiceAccount" and "conveyor-test" not in str(item)]
    assert len(accounts) == len(PARTS)
    assert not any(account["automountServiceAccountToken"] for account in accounts)
    assert all(spec["automountServiceAccountToken"] for spec in pods_of(rendered).values())


DIGEST = f"sha256:{'0123456789abcdef' * 4}"


@pytest.mark.parametrize(
    ("values", "suffix"),
    [
        ((), ":0.1.0"),
        (("tag=v9",), ":v9"),
        ((f"digest={DIGEST}",), f"@{DIGEST}"),
        (("tag=v9", f"digest={DIGEST}"), f"@{DIGEST}"),
    ],
)
@pytest.mark.parametrize("registry", ["", "registry.example.com:5000/mirror"])
def test_images_have_their_registry_and_the_digest_before_the_tag(
    values: tuple[str, ...], suffix: str, registry: str
) -> None:
    given = [f"{image}.{value}" for image in ("image", "engine.image") for value in values]
    pods = pods_of(render(f"imageRegistry={registry}", *given))
    prefix = registry and f"{registry}/"
    assert {spec["containers"][0]["image"] for spec in pods.values()} == {f"{prefix}conveyor/control{suffix}"}
    assert f"--engine-image={prefix}conveyor/engine{suffix}" in pods["conveyor-operator"]["containers"][0]["args"]


def test_a_metrics_server_on_the_nodes_network_has_its_ports_and_is_let_in() -> None:
    values = {"hostNetwork": True, "httpsPort": 10251, "adminPort": 18081}
    objects = render_json(metrics=values)
    deployment = find(objects, "Deployment", "conveyor-metrics")
    spec, made = pod(deployment), container(deployment)
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert {port["name"]: port["containerPort"] for port in made["ports"]} == {"https": 10251, "admin": 18081}
    assert {"--https-port=10251", "--admin-port=18081"} <= set(made["args"])
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert find(objects, "NetworkPolicy", "conveyor-metrics")["spec"]["ingress"][0]["ports"][0]["port"] == 10251
    gateway = find(objects, "NetworkPolicy", "conveyor-gateway")["spec"]["ingress"]
    assert [rule for rule in gateway if "from" in rule] == []
    with pytest.raises(HelmFailed, match="must not be 10250, which is the kubelet's"):
        render("metrics.hostNetwork=true")
