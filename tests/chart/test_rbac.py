"""Tests for least privilege: every process works with the chart's roles and uses all rights that they grant.

Operator, gateway, metrics server and console run as their own ServiceAccounts, with the chart's flags, on a control
plane that writes down each of their calls. Nothing is missing if they do their work and nothing was refused; nothing is
too much if every (group, resource, verb) of the rendered roles was used.
"""

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.chart import installation
from tests.chart.installation import (
    API_SERVICES_PATH,
    RELEASE,
    AuditedControlPlane,
    CommandFailed,
    Json,
    Release,
    find,
    helm,
    make_reachable_chart,
    read_secret,
    render,
    running,
    running_metrics,
    running_operator,
    take_over,
    write_account_kubeconfig,
)
from tests.gateway.cluster import own_address, publish_gateway
from tests.gateway.keys import make_api_key, make_key
from tests.metrics.aggregation import free_port
from tests.operator import scaled_objects
from tests.operator.kubelet import Kubelet, prewarmed, ready
from tests.operator.stage import Space, wait_until

from conveyor_api.names import (
    API_KEY_PLURAL,
    API_VERSION,
    INFERENCE_SERVICE_LABEL,
    METRICS_API_ROLE,
    METRICS_TLS_SECRET,
    SYSTEM_NAMESPACE,
)
from e2e.cluster.api import Api, ApiError

pytestmark = pytest.mark.slow

PROCESSES = (*installation.PROCESSES, "console")
WITH_CONSOLE = "console.enabled=true"

Right = tuple[str, str, str]
"""API group, resource (with its subresource) and verb."""

# What a process needs and no call shows.
UNSEEN: dict[str, dict[Right, str]] = {
    "operator": {
        ("conveyor.dev", "inferenceservices/finalizers", "update"): (
            "asked for by OwnerReferencesPermissionEnforcement (on here) when a child names its owner"
        ),
        ("apps", "replicasets", "get"): "the pod template that is restored after a failed rollout (docs/adr/0130)",
        ("conveyor.dev", "inferenceservices", "get"): "one that is too large to be kept (docs/adr/0097)",
    },
    "gateway": {
        ("", "serviceaccounts/token", "create"): "for engines that verify callers (docs/adr/0195)",
    },
}
# Granted to every account by Kubernetes itself, not by the chart.
DISCOVERY = {"", "version", "api", "apis", "openapi", "openid", ".well-known"}


@pytest.fixture(scope="module")
def rendered() -> list[Json]:
    """The objects of the chart with its defaults and the console."""
    return render(WITH_CONSOLE)


@pytest.fixture(scope="module")
def used(chart_plane: AuditedControlPlane, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Json]]:
    """The calls of each process after it has done all its work, in a release for the whole cluster."""
    return run_everything(chart_plane, tmp_path_factory.mktemp("everywhere"), f"--set={WITH_CONSOLE}")


@pytest.fixture(scope="module")
def used_in_one(chart_plane: AuditedControlPlane, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Json]]:
    """The calls of each process in a release for one namespace."""
    folder = tmp_path_factory.mktemp("one")
    options = (WITH_CONSOLE, f"watchNamespaces={{{namespace_of(folder)}}}")
    return run_everything(chart_plane, folder, *(f"--set={option}" for option in options))


def namespace_of(folder: Path) -> str:
    return f"rbac-{folder.name}"


def run_everything(plane: AuditedControlPlane, folder: Path, *options: str) -> dict[str, list[Json]]:
    """Install the chart, let each process do all its work in a namespace, and uninstall.

    Returns the calls of each process.
    """
    api = Api(plane.kubeconfig)
    space = Space(api, namespace_of(folder))
    api.create("/api/v1/namespaces", {"metadata": {"name": space.namespace}})
    scaled_objects.install(api)
    rendered = render(*(option.removeprefix("--set=") for option in options))
    reachable = make_reachable_chart(folder)
    install = ("install", RELEASE, reachable.chart, "--namespace", SYSTEM_NAMESPACE)
    helm(*install, *options, kubeconfig=plane.kubeconfig)
    before = {process: len(plane.read_audit(account_of(process))) for process in PROCESSES}
    try:
        with running_operator(plane, rendered, folder) as check:
            exercise_operator(space, check)
            address, port, admin_port = own_address(), free_port(), free_port()
            ports = (f"--host={address}", f"--port={port}", f"--admin-port={admin_port}")
            with running(plane, "gateway", rendered, folder, *ports, "--drain-delay-seconds=0"):
                wait_for_watches(plane, "gateway", before["gateway"], 4)
                publish_gateway(api, SYSTEM_NAMESPACE, "gateway", admin_port)
                exercise_keys(api, space.namespace, f"http://{address}:{port}", check)
            with running(plane, "console", rendered, folder, "--host=127.0.0.1", "--port=0"):
                wait_for_watches(plane, "console", before["console"], 2)
                exercise_console(api, folder / f"console-{SYSTEM_NAMESPACE}.log")
            with running_metrics(plane, rendered, folder, reachable.port):
                wait_for_watches(plane, "metrics", before["metrics"], 2)
                exercise_registration(Release(plane), check)
        with running_operator(plane, rendered, folder, "--network-policies=false", "--unserved-name-seconds=1"):
            space.make_service("trial")
            wait_until("its name", lambda: "trial" in find_names(space))
            space.delete("InferenceService", "trial")
            wait_until("the end of its name", lambda: "trial" not in find_names(space))
            wait_until("the end of the policy", lambda: not space.list("NetworkPolicy"))
            # The garbage collector looks for new definitions every 30 seconds.
            wait_until("the end of the children", lambda: not space.children("qwen"))
        return {process: plane.read_audit(account_of(process))[before[process] :] for process in PROCESSES}
    finally:
        helm("uninstall", RELEASE, "--namespace", SYSTEM_NAMESPACE, kubeconfig=plane.kubeconfig)
        for service in space.list("InferenceService"):  # at once: other tests save and bring back all there are
            space.delete("InferenceService", service["metadata"]["name"])
        api.delete(f"/api/v1/namespaces/{space.namespace}")


def find_names(space: Space) -> set[str]:
    return {claim["spec"]["name"] for claim in space.list("ServedName")}


def exercise_operator(space: Space, check: Callable[[], None]) -> None:
    """Create, scale and edit a service, delete its children, and remove its volume."""
    wait_until("its certificate", lambda: check() or read_secret(space.api, METRICS_TLS_SECRET))
    name = "qwen"
    cache = {"strategy": "PVC", "size": "1Gi"}
    with Kubelet(space, lambda pod: (prewarmed if "job-name" in pod["metadata"]["labels"] else ready)(pod)):
        space.make_service(name, model={"uri": "hf://org/name@main", "cache": cache}, autoscaling={"maxReplicas": 3})
        space.wait_condition(name, "WorkloadReady", "True", "ReplicasReady", 60)
        space.wait_condition(name, "Ready", "True", "Ready", 60)  # so its name has served
        lose_labels(space, name)
        space.delete("Service", name)
        wait_until("its Service again", lambda: space.get("Service", name))
        old = {c for c in space.children(name) if c[0] == "ConfigMap"}
        space.edit(name, autoscaling={"provider": "KEDA"})
        wait_until("the ScaledObject", lambda: space.list("ScaledObject"))
        lose_labels(space, name)
        space.edit(name, autoscaling=None, replicas=2, model={"cache": {"strategy": "EmptyDir", "size": None}})
        wait_until("the end of the ScaledObject", lambda: not space.list("ScaledObject"))
        space.edit(name, batching={"maxBatchSize": 7})
        wait_until(
            "the end of the old ConfigMap", lambda: not old & space.children(name), show=lambda: space.children(name)
        )
        wait_until("the end of the volume", lambda: not live(space.list("PersistentVolumeClaim")))
        cache = {"strategy": "PVC", "claimName": "mine", "prewarm": True}
        space.make_service("warm", model={"uri": "hf://org/name@main", "cache": cache})
        space.wait_condition("warm", "WorkloadReady", "True", "ReplicasReady", 60)
        lose_labels(space, "warm")
        space.edit("warm", model={"cache": {"prewarm": False}})
        wait_until("the end of the Job", lambda: not space.list("Job"))
        space.delete("InferenceService", "warm")
        space.make_service("kept")
        wait_until("its policy", lambda: space.get("NetworkPolicy", "kept-engine"))
        wait_until("Events", lambda: space.list("Event"))
        space.delete("InferenceService", name)


def exercise_keys(api: Api, namespace: str, url: str, check: Callable[[], None]) -> None:
    """Use a key at the gateway, so that the operator writes the status of its APIKey."""
    path = f"/apis/{API_VERSION}/namespaces/{namespace}/{API_KEY_PLURAL}"
    api.create(path, make_api_key(namespace))
    request = urllib.request.Request(f"{url}/v1/models", headers={"x-api-key": make_key(namespace)})

    def is_seen() -> bool:
        check()
        urllib.request.urlopen(request, timeout=10).close()
        return "lastUsed" in api.get(f"{path}/ci").get("status", {})

    wait_until("the last use of the key", is_seen)


def lose_labels(space: Space, name: str) -> None:
    """Remove the label of each child of a service. No watch shows the child any more, so the operator reads it."""

    def labelled() -> set[tuple[str, str]]:
        scaled = space.list("ScaledObject", f"{INFERENCE_SERVICE_LABEL}={name}")
        return space.children(name) | {("ScaledObject", each["metadata"]["name"]) for each in scaled}

    children = labelled()
    for kind, child in children:
        space.patch(kind, child, {"metadata": {"labels": {INFERENCE_SERVICE_LABEL: None}}})
    wait_until("the labels again", lambda: labelled() >= children, show=labelled)


def live(objects: list[Json]) -> list[Json]:
    """Return the objects that are not being deleted. No controller here removes the finalizer of a volume in use."""
    return [item for item in objects if "deletionTimestamp" not in item["metadata"]]


def exercise_console(api: Api, log: Path) -> None:
    """Read the overview and the usage as an account without rights."""
    wait_until("its port", lambda: "serving port=" in log.read_text())
    port = log.read_text().partition("serving port=")[2].split()[0]
    token = api.create(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts/default/token", {"spec": {}})
    headers = {"Authorization": f"Bearer {token['status']['token']}"}

    def shows(path: str, text: bytes) -> bool:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return text in response.read()

    wait_until("its page", lambda: shows("/", b"There are no services that you may see"))
    readable = (b"No gateway has reported usage yet", b"Nothing was used", b"You may see nothing of what was used")
    assert any(shows("/usage", text) for text in readable)


def exercise_registration(release: Release, check: Callable[[], None]) -> None:
    """Let the operator register the APIs while the server answers, and withdraw when another owner takes one over."""
    wait_until("both APIServices", lambda: check() or None not in release.registered())
    release.api.delete(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/{METRICS_TLS_SECRET}")
    wait_until("its Secret again", lambda: check() or has_certificate(release.api))
    take_over(release, "v1beta1")
    wait_until("the other is withdrawn", lambda: check() or release.api_service("v1beta2") is None)
    wait_until("no owner of ours is left", lambda: check() or not owners(release, "v1beta1"))
    release.api.delete(f"{API_SERVICES_PATH}/v1beta1.custom.metrics.k8s.io")


def has_certificate(api: Api) -> bool:
    try:
        return bool(read_secret(api, METRICS_TLS_SECRET))
    except ApiError:
        return False


def owners(release: Release, version: str) -> list[Json]:
    found = release.api_service(version)
    assert found is not None
    return list(found["metadata"].get("ownerReferences", ()))


def wait_for_watches(plane: AuditedControlPlane, process: str, before: int, count: int) -> None:
    """Wait until the process watches this many kinds. Each is listed first. before: number of earlier calls to skip."""

    def watched() -> set[str]:
        calls = plane.read_audit(account_of(process))[before:]
        return {call["objectRef"]["resource"] for call in calls if call["verb"] == "watch"}

    wait_until(f"the watches of {process}", lambda: len(watched()) >= count, show=watched)


def account_of(process: str) -> str:
    return f"system:serviceaccount:{SYSTEM_NAMESPACE}:conveyor-{process}"


def used_rights(calls: list[Json]) -> set[Right]:
    """Return the used rights.

    Server-side apply of a new object is `patch` in the log but also needs the right to `create`.
    """
    rights = set()
    for call in calls:
        if reference := call.get("objectRef"):
            resource = "/".join(filter(None, (reference.get("resource"), reference.get("subresource"))))
            verbs = [call["verb"]]
            if call["verb"] == "patch" and call["responseStatus"]["code"] == 201:
                verbs.append("create")
            rights |= {(reference.get("apiGroup", ""), resource, verb) for verb in verbs}
    return rights


def granted_rights(rendered: list[Json], process: str) -> set[Right]:
    """Return the rights that the chart's roles grant to a process, by the bindings of its ServiceAccount."""
    rights: set[Right] = set()
    for binding in rendered:
        subjects = {subject["name"] for subject in binding.get("subjects", ())}
        if f"conveyor-{process}" not in subjects:
            continue
        reference = binding["roleRef"]
        if reference["name"] == "extension-apiserver-authentication-reader":  # Kubernetes' own
            rights |= {("", "configmaps", verb) for verb in ("list", "watch")}
            continue
        if reference["name"] == "system:auth-delegator":  # Kubernetes' own
            rights |= {("authentication.k8s.io", "tokenreviews", "create")}
            rights |= {("authorization.k8s.io", "subjectaccessreviews", "create")}
            continue
        for rule in find(rendered, reference["kind"], reference["name"])["rules"]:
            rights |= {(g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    return rights


def is_too_new(call: Json) -> bool:
    """Return whether a call failed because OwnerReferencesPermissionEnforcement does not know a new CRD yet."""
    return "cannot find RESTMapping" in call["responseStatus"].get("message", "")


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("where", ["used", pytest.param("used_in_one", marks=pytest.mark.nightly)])
def test_nothing_is_missing(where: str, process: str, request: pytest.FixtureRequest) -> None:
    calls = request.getfixturevalue(where)[process]
    refused = [call for call in calls if call["responseStatus"].get("code") in (401, 403) and not is_too_new(call)]
    assert [(call["verb"], call["requestURI"]) for call in refused] == []
    assert calls


@pytest.mark.parametrize("process", PROCESSES)
def test_nothing_is_too_much(used: dict[str, list[Json]], rendered: list[Json], process: str) -> None:
    unused = granted_rights(rendered, process) - used_rights(used[process]) - UNSEEN.get(process, {}).keys()
    assert unused == set()


@pytest.mark.parametrize("process", PROCESSES)
def test_what_is_used_comes_from_the_chart_and_from_nowhere_else(
    used: dict[str, list[Json]], rendered: list[Json], process: str
) -> None:
    assert used_rights(used[process]) - granted_rights(rendered, process) == set()
    paths = {call["requestURI"].strip("/").split("/")[0] for call in used[process] if "objectRef" not in call}
    assert paths <= DISCOVERY


def test_the_right_to_register_is_bound_to_two_names(release: Release, tmp_path: Path) -> None:
    """The right to create them is bound too, because server-side apply has the object's name, unlike a POST."""
    release.upgrade()
    kubeconfig = write_account_kubeconfig(release.plane, "conveyor-operator", tmp_path / "kubeconfig")

    def apply(group: str, *flags: str) -> str:
        spec = {"group": group, "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100}
        body = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService"}
        body |= {"metadata": {"name": f"v1beta1.{group}"}, "spec": spec}
        file = tmp_path / "api-service.json"
        file.write_text(json.dumps(body))
        return release.shell(f"kubectl --kubeconfig {kubeconfig} {' '.join(flags)} --dry-run=server -f {file}")

    assert "serverside-applied" in apply("custom.metrics.k8s.io", "apply", "--server-side")
    for group, *flags in (("external.metrics.k8s.io", "apply", "--server-side"), ("custom.metrics.k8s.io", "create")):
        with pytest.raises(CommandFailed, match="forbidden"):
            apply(group, *flags)


def test_no_role_has_a_wildcard_and_none_reads_secrets_but_its_own(rendered: list[Json]) -> None:
    rules = [rule for role in rendered for rule in role.get("rules", ())]
    assert not [rule for rule in rules if "*" in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])]
    of_secrets = [rule.get("resourceNames") for rule in rules if "secrets" in rule["resources"]]
    assert of_secrets
    assert of_secrets == [[METRICS_TLS_SECRET]] * len(of_secrets)


def test_with_named_namespaces_no_role_for_services_reaches_beyond_them() -> None:
    objects = render("watchNamespaces={team-a,team-b}")
    cluster_wide = {item["roleRef"]["name"] for item in objects if item["kind"] == "ClusterRoleBinding"}
    assert cluster_wide == {METRICS_API_ROLE}
    of_services = {f"conveyor-{process}-services" for process in ("operator", "gateway")}
    found = {(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in objects}
    places = {(kind, namespace) for kind, namespace, name in found if name in of_services}
    assert places == {(kind, team) for kind in ("Role", "RoleBinding") for team in ("team-a", "team-b")}
