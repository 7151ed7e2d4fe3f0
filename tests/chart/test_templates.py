"""Tests that the chart renders valid objects, restricted pods, and flags and ports that the processes have."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.chart.installation import CHART, PARSERS, PROCESSES, Json, dry_run, find, helm, pods_of, render

import conveyor_gateway.settings
from conveyor_api import names
from conveyor_api.quantities import parse_quantity
from conveyor_kube.gateways import ADMIN_PORT_NAME
from conveyor_operator.inferenceservice.profiles import read_profiles
from e2e.cluster.api import Api, ApiError
from e2e.cluster.tools import binary

# Everything that may be turned on, at once.
FULL = (
    "image.tag=v9",
    "engine.image.tag=v9",
    "imagePullSecrets[0].name=registry",
    "gateway.service.type=LoadBalancer",
    "gateway.service.nodePort=30080",
    "gateway.service.annotations.a/b=c",
    "gateway.service.ipFamilyPolicy=PreferDualStack",
    "gateway.service.ipFamilies={IPv4}",
    "gateway.url=https://inference.example.com",
    "gateway.publicHosts={inference.example}",
    "gateway.trustedProxies={10.244.0.0/16,fd00::/64}",
    "gateway.cors.allowedOrigins={https://chat.example.com,http://localhost:3000}",
    "gateway.rootModels=All",
    "gateway.access=Enforced",
    "gateway.limits.namespaces.team-a.tokensPerDay=5000000",
    *(f"{process}.nodeSelector.disk=fast" for process in PROCESSES),
    *(f"{process}.priorityClassName=system-cluster-critical" for process in PROCESSES),
    *(f"{process}.tolerations[0].operator=Exists" for process in PROCESSES),
    *(f"{process}.affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution=null" for process in PROCESSES),
    *(f"{process}.logLevel=debug" for process in PROCESSES),
    "operator.extraArgs={--workers=4}",
    "gateway.extraArgs={--max-request-bytes=1000}",
    "gateway.autoscaling.enabled=true",
    "metrics.extraArgs={--gateway-timeout-seconds=2}",
    "networkPolicies.prometheusNamespaces={monitoring}",
    "networkPolicies.clientNamespaces={projectcontour}",
)
GATEWAY = ("gateway.drainTimeoutSeconds=30", "gateway.replicas=3")
VALUES = {
    "defaults": (),
    "without metrics and policies": ("metrics.enabled=false", "networkPolicies.create=false"),
    "everything": FULL,
    "two namespaces": ("watchNamespaces={default,kube-public}",),
    "console": ("console.enabled=true", "networkPolicies.consoleNamespaces={proxies}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_api_server_takes_every_object(api: Api, values: tuple[str, ...]) -> None:
    dry_run(api, render(*values))


@pytest.mark.slow
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_every_pod_fits_the_restricted_level(api: Api, values: tuple[str, ...]) -> None:
    pods = pods_of(render(*values))
    processes = [process for process in PROCESSES if process != "metrics" or "metrics.enabled=false" not in values]
    processes += ["console"] * ("console.enabled=true" in values)
    assert pods.keys() == {f"conveyor-{process}" for process in processes}
    for name, spec in pods.items():
        create_pod(api, name, spec)


@pytest.mark.parametrize("field", ["runAsNonRoot", "seccompProfile"])
def test_a_pod_that_does_not_fit_would_be_refused(api: Api, rendered: list[Json], field: str) -> None:
    """This shows that the test above can fail."""
    name, spec = next(iter(pods_of(rendered).items()))
    context = {key: value for key, value in spec["securityContext"].items() if key != field}
    with pytest.raises(ApiError, match="violates PodSecurity"):
        create_pod(api, name, {**spec, "securityContext": context})


def create_pod(api: Api, name: str, spec: Json) -> None:
    """Create the pod as a dry run in a namespace that enforces the level. The chart's PriorityClass is not there."""
    pods = f"/api/v1/namespaces/{names.SYSTEM_NAMESPACE}/pods?dryRun=All"
    api.create(
        pods, {"metadata": {"name": name}, "spec": {**spec, "serviceAccountName": "default", "priorityClassName": ""}}
    )


def test_no_control_container_can_write_to_its_image(rendered: list[Json]) -> None:
    for spec in pods_of(rendered).values():
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert "limits" in container["resources"]
        assert all("sizeLimit" in volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume)


def test_kubeconform_finds_every_object_valid(api: Api, rendered: list[Json], tmp_path: Path) -> None:
    """The schemas are the API server's own, because others would need a network."""
    write_schemas(api, {item["apiVersion"] for item in rendered}, tmp_path)
    assert run_kubeconform(rendered, tmp_path)["summary"]["valid"] == len(rendered)
    broken = json.loads(json.dumps(rendered))
    find(broken, "Deployment", "conveyor-operator")["spec"]["replica"] = 1
    assert run_kubeconform(broken, tmp_path)["summary"]["invalid"] == 1


def write_schemas(api: Api, api_versions: set[str], folder: Path) -> None:
    """Write a schema file for each kind, `<kind>-<group>-<version>.json`. The schemas allow no other fields."""
    for api_version in api_versions:
        document = api.get(f"/openapi/v3/{'api' if api_version == 'v1' else 'apis'}/{api_version}")
        schemas = document["components"]["schemas"]
        for schema in schemas.values():
            if "properties" in schema:
                schema.setdefault("additionalProperties", False)
        for name, schema in schemas.items():
            for kind in schema.get("x-kubernetes-group-version-kind", ()):
                root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
                group = kind["group"] or "v1"  # so kubeconform calls the group that has no name
                file = f"{kind['kind']}-{group}-{kind['version']}.json".lower()
                (folder / file).write_text(json.dumps(root))


def run_kubeconform(objects: list[Json], schemas: Path) -> Any:
    location = f"{schemas}/{{{{.ResourceKind}}}}-{{{{.Group}}}}-{{{{.ResourceAPIVersion}}}}.json"
    command = [binary("kubeconform"), "-strict", "-output=json", "-summary", f"-schema-location={location}", "-"]
    text = "---\n".join(json.dumps(item) + "\n" for item in objects)
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_every_process_understands_its_flags(values: tuple[str, ...]) -> None:
    pods = pods_of(render(*values))
    assert {"conveyor-operator", "conveyor-gateway"} <= pods.keys() <= PARSERS.keys()
    for name, spec in pods.items():
        (container,) = spec["containers"]
        assert container["command"] == ["python", "-m", name.replace("-", "_")]
        PARSERS[name](container["args"], {})


def test_an_autoscaler_of_the_gateways_sets_their_number_alone() -> None:
    objects = render("gateway.autoscaling.enabled=true", "gateway.autoscaling.cpu=300m")
    assert "replicas" not in find(objects, "Deployment", "conveyor-gateway")["spec"]
    autoscaler = find(objects, "HorizontalPodAutoscaler", "conveyor-gateway")["spec"]
    assert autoscaler["scaleTargetRef"]["name"] == "conveyor-gateway"
    assert autoscaler["metrics"][0]["resource"]["target"] == {"type": "AverageValue", "averageValue": "300m"}
    assert "HorizontalPodAutoscaler" not in {item["kind"] for item in render()}


def test_one_gateway_more_restarts_none() -> None:
    templates = [pods_of(render(f"gateway.replicas={count}"))["conveyor-gateway"] for count in (2, 8)]
    assert templates[0] == templates[1]


def test_values_reach_the_processes() -> None:
    objects = render(*FULL, "watchNamespaces={a,b}", "clusterDomain=example.org", *GATEWAY)
    args = {
        name: dict(arg.removeprefix("--").split("=", 1) for arg in spec["containers"][0]["args"])
        for name, spec in pods_of(objects).items()
    }
    operator, gateway = args["conveyor-operator"], args["conveyor-gateway"]
    assert operator["engine-image"] == "conveyor/engine:v9"
    assert (operator["watch-namespaces"], gateway["watch-namespaces"]) == ("a,b", "a,b")
    assert operator["cluster-domain"] == "example.org"
    assert operator["gateway-url"] == "https://inference.example.com"
    assert gateway["public-hosts"] == "inference.example"
    spec = pods_of(objects)["conveyor-gateway"]
    settings = conveyor_gateway.settings.PROGRAM.parse(spec["containers"][0]["args"], {})
    assert settings.drain_timeout_seconds == 30
    assert [str(network) for network in settings.trusted_proxies] == ["10.244.0.0/16", "fd00::/64"]
    assert settings.allowed_origins == ("https://chat.example.com", "http://localhost:3000")
    assert spec["terminationGracePeriodSeconds"] > settings.drain_delay_seconds + settings.drain_timeout_seconds
    assert {args[name]["log-level"] for name in args} == {"debug"}


@pytest.mark.parametrize(("values", "user"), [((), 65532), (("userId=1000",), 1000), (("userId=null",), None)])
def test_the_pods_have_the_user_that_is_named_or_the_platform_s(values: tuple[str, ...], user: int | None) -> None:
    pods = pods_of(render(*values))
    for spec in pods.values():
        assert spec["securityContext"].get("runAsUser") == spec["securityContext"].get("runAsGroup") == user
    (arg,) = [a for a in pods["conveyor-operator"]["containers"][0]["args"] if a.startswith("--user-id=")]
    assert arg == f"--user-id={user or 0}"


def test_profiles_reach_the_operator_and_a_change_of_them_restarts_it(tmp_path: Path) -> None:
    hashes = set()
    for gpu in ("l4", "t4"):
        objects = render("profiles.small.resources.limits.cpu=2", f"profiles.small.pod.nodeSelector.gpu={gpu}")
        file = tmp_path / "profiles.yaml"
        file.write_text(find(objects, "ConfigMap", "conveyor-profiles")["data"]["profiles.yaml"])
        filled, _ = read_profiles(file).fill({"spec": {"profile": "small"}})
        assert filled["spec"]["pod"] == {"nodeSelector": {"gpu": gpu}}
        assert filled["spec"]["resources"] == {"limits": {"cpu": 2}}
        template = find(objects, "Deployment", "conveyor-operator")["spec"]["template"]
        hashes.add(template["metadata"]["annotations"]["conveyor.dev/profiles-hash"])
        (container,) = template["spec"]["containers"]
        (path,) = [arg.partition("=")[2] for arg in container["args"] if arg.startswith("--profiles=")]
        (folder,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "profiles"]
        assert path == f"{folder}/profiles.yaml"
    assert len(hashes) == 2


def test_ports_and_names_are_those_that_the_parts_share(rendered: list[Json]) -> None:
    for service, port, container_port in (
        (names.GATEWAY_SERVICE, names.GATEWAY_SERVICE_PORT, names.GATEWAY_PORT),
        (names.GATEWAY_ADMIN_SERVICE, names.GATEWAY_ADMIN_PORT, names.GATEWAY_ADMIN_PORT),
        (names.METRICS_SERVICE, names.METRICS_SERVICE_PORT, names.METRICS_PORT),
    ):
        spec = find(rendered, "Service", service)["spec"]
        assert spec["ports"][0]["port"] == port
        deployment = find(rendered, "Deployment", spec["selector"]["app.kubernetes.io/name"])
        template = deployment["spec"]["template"]
        assert spec["selector"].items() <= template["metadata"]["labels"].items()
        ports = {p["name"]: p["containerPort"] for p in template["spec"]["containers"][0]["ports"]}
        assert ports[spec["ports"][0]["targetPort"]] == container_port
    admin = find(rendered, "Service", names.GATEWAY_ADMIN_SERVICE)["spec"]
    assert (admin["clusterIP"], admin["publishNotReadyAddresses"]) == ("None", True)
    assert admin["ports"][0]["name"] == ADMIN_PORT_NAME
    assert "data" not in find(rendered, "Secret", names.METRICS_TLS_SECRET)


PROBES = {
    "conveyor-operator": (names.OPERATOR_ADMIN_PORT, names.LIVENESS_PATH, names.READINESS_PATH),
    "conveyor-gateway": (names.GATEWAY_ADMIN_PORT, names.GATEWAY_HEALTH_PATH, names.READINESS_PATH),
    "conveyor-metrics": (names.METRICS_ADMIN_PORT, names.LIVENESS_PATH, names.READINESS_PATH),
}


def test_probes_use_the_paths_that_each_process_serves_on_its_admin_port(rendered: list[Json]) -> None:
    for name, spec in pods_of(rendered).items():
        (container,) = spec["containers"]
        port, *paths = PROBES[name]
        assert {"name": ADMIN_PORT_NAME, "containerPort": port} in container["ports"]
        probes = [container[probe]["httpGet"] for probe in ("livenessProbe", "readinessProbe")]
        assert probes == [{"path": path, "port": ADMIN_PORT_NAME} for path in paths]


def test_no_service_of_the_namespace_sets_a_variable_of_a_pod(rendered: list[Json]) -> None:
    """The Service conveyor-gateway would set CONVEYOR_GATEWAY_PORT to tcp://..., and the gateway would not start."""
    assert all(spec["enableServiceLinks"] is False for spec in pods_of(rendered).values())


def test_no_webhook_can_block_a_write() -> None:
    objects = render("console.enabled=true", "networkPolicies.create=true")
    assert not [item["kind"] for item in objects if "Webhook" in item["kind"]]
    crds = [item["spec"] for item in objects if item["kind"] == "CustomResourceDefinition"]
    assert len(crds) == 3
    assert all(crd.get("conversion", {"strategy": "None"}) == {"strategy": "None"} for crd in crds)


def test_no_version_rolls_a_pod() -> None:
    deployments = [item for item in render("console.enabled=true") if item["kind"] == "Deployment"]
    assert len(deployments) == len(PARSERS)
    for item in deployments:
        labels = item["spec"]["template"]["metadata"]["labels"]
        assert not {"app.kubernetes.io/version", "helm.sh/chart"} & labels.keys()


def test_every_part_that_services_need_has_two_pods_of_which_one_at_a_time_may_be_evicted(rendered: list[Json]) -> None:
    for name in PARSERS.keys() - {"conveyor-console"}:
        assert find(rendered, "Deployment", name)["spec"]["replicas"] == 2
        assert find(rendered, "PodDisruptionBudget", name)["spec"]["maxUnavailable"] == 1


def test_the_console_is_off_by_default_and_has_one_pod(rendered: list[Json]) -> None:
    assert not any("console" in item["metadata"]["name"] for item in rendered)
    assert find(render("console.enabled=true"), "Deployment", "conveyor-console")["spec"]["replicas"] == 1


def test_a_gateway_requests_the_memory_of_all_bodies_that_it_may_hold(rendered: list[Json]) -> None:
    """A node without memory first evicts pods that use more than they request."""
    requested = pods_of(rendered)["conveyor-gateway"]["containers"][0]["resources"]["requests"]["memory"]
    own_bytes = 128 << 20  # of a gateway without requests
    assert parse_quantity(requested) >= own_bytes + conveyor_gateway.settings.Settings().max_held_bytes


def test_turned_off_parts_are_not_rendered() -> None:
    objects = render("crds.create=false", "metrics.enabled=false", "networkPolicies.create=false")
    assert not {"CustomResourceDefinition", "NetworkPolicy", "Secret"} & {item["kind"] for item in objects}
    assert not any("metrics" in item["metadata"]["name"] for item in objects)
    arguments = pods_of(objects)["conveyor-operator"]["containers"][0]["args"]
    assert {"--metrics-api=false", "--network-policies=false"} <= set(arguments)
    names_of_roles = {item["metadata"]["name"] for item in render("userRoles.create=false")}
    assert not any("inferenceservice-" in name for name in names_of_roles)


def test_helm_registers_no_api(rendered: list[Json]) -> None:
    """The operator does when the server answers, because an APIService without a server blocks the whole cluster."""
    assert not [item for item in rendered if item["kind"] == "APIService"]
    assert find(rendered, "ClusterRole", names.METRICS_API_ROLE)


def test_the_notes_name_the_next_commands() -> None:
    text = helm("install", "conveyor", CHART, "--namespace=somewhere", "--dry-run=client", "--set=crds.create=false")
    notes = text.partition("NOTES:")[2]
    assert "kubectl --namespace somewhere port-forward service/conveyor-gateway" in notes
    assert "kubectl --namespace default wait --for=condition=Ready" in notes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((), "every pod of the cluster may connect"),
        (("networkPolicies.clientNamespaces={team-a}",), "may connect to the gateways: somewhere, team-a"),
        (("networkPolicies.create=false",), ""),
    ],
)
def test_the_notes_say_who_may_connect_to_the_gateways(values: tuple[str, ...], message: str) -> None:
    options = [f"--set={each}" for each in ("crds.create=false", *values)]
    notes = helm("install", "conveyor", CHART, "--namespace=somewhere", "--dry-run=client", *options)
    assert message in notes
    assert ("may connect" in notes) == bool(message)
