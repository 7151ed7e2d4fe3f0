"""Installs, upgrades and uninstalls the chart with Helm on a real control plane, while the real operator works."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from tests.chart.installation import (
    AuditedControlPlane,
    Json,
    Reachable,
    Release,
    make_reachable_chart,
    path_of,
    read_secret,
    render,
    running_metrics,
    running_operator,
)

from conveyor_api.names import CRD_NAME, METRICS_TLS_SECRET
from e2e.cluster.api import Api, ApiError, wait_until

pytestmark = pytest.mark.slow

CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}"
SERVICES = "/apis/conveyor.dev/v1alpha1/namespaces/default/inferenceservices"


def exists(api: Api, item: Json) -> bool:
    try:
        return api.reachable(path_of(api, item))
    except (ApiError, StopIteration):  # its kind is not served any more
        return False


@pytest.fixture
def reachable(tmp_path: Path) -> Reachable:
    return make_reachable_chart(tmp_path)


def test_an_upgrade_keeps_the_certificate_and_the_registration(
    release: Release, reachable: Reachable, tmp_path: Path
) -> None:
    release.upgrade(chart=reachable.chart)
    assert read_secret(release.api, METRICS_TLS_SECRET) == {}
    assert release.registered() == [None, None]
    with (
        running_operator(release.plane, render(), tmp_path) as check,
        running_metrics(release.plane, render(), tmp_path, reachable.port),
    ):
        wait_until("both APIServices", lambda: None not in release.registered(), check)
        secret, before = read_secret(release.api, METRICS_TLS_SECRET), release.registered()
        assert secret.keys() >= {"tls.crt", "tls.key", "ca.crt"}
        output = release.shell("kubectl get apiservice v1beta2.custom.metrics.k8s.io")
        assert "conveyor-system/conveyor-metrics" in output
        for values in (("gateway.replicas=3",), ()):
            release.upgrade(*values, chart=reachable.chart)
            assert read_secret(release.api, METRICS_TLS_SECRET) == secret
            assert release.registered() == before


# However the chart comes, it goes in the same way.
WAYS = {
    "helm": ("helm install conveyor {chart} {options}", "helm uninstall conveyor -n conveyor-system"),
    "kubectl": ("kubectl apply -f {file}", "kubectl delete -f {file} --wait=false"),
    "server-side": ("kubectl apply --server-side -f {file}", "kubectl delete -f {file} --wait=false"),
    "off": (
        "helm install conveyor {chart} {options}",
        "helm upgrade conveyor {chart} {options} --set metrics.enabled=false",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_registration_comes_and_goes_with_the_chart_however_that_is_applied(
    way: str, release: Release, reachable: Reachable, tmp_path: Path
) -> None:
    """The operator is dead when the chart is uninstalled, so only the garbage collector removes the registration."""
    if not release.api.reachable(CRD):
        release.upgrade()
        release.uninstall()
    file = tmp_path / "chart.yaml"
    options = "--namespace conveyor-system --set crds.create=false"
    release.shell(f"helm template conveyor {reachable.chart} {options} --no-hooks > {file}")
    install, remove = (command.format(chart=reachable.chart, file=file, options=options) for command in WAYS[way])
    release.shell(install)
    try:
        with (
            running_operator(release.plane, render(), tmp_path) as check,
            running_metrics(release.plane, render(), tmp_path, reachable.port),
        ):
            wait_until("both APIServices", lambda: None not in release.registered(), check)
    finally:
        release.shell(remove)
    wait_until("their end", lambda: release.registered() == [None, None])


@dataclass
class Uninstalled:
    """An uninstalled release, and an InferenceService that existed before."""

    release: Release
    service: str


@pytest.fixture(scope="module")
def uninstalled(chart_plane: AuditedControlPlane) -> Iterator[Uninstalled]:
    release = Release(chart_plane)
    release.upgrade()
    wait_until("the CRD", lambda: release.api.reachable(SERVICES))
    service = {
        "apiVersion": "conveyor.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": f"kept-{uuid4().hex[:6]}"},
        "spec": {"model": {"uri": "pvc://models/tiny"}},
    }
    path = f"{SERVICES}/{release.api.create(SERVICES, service)['metadata']['name']}"
    release.uninstall()
    yield Uninstalled(release, path)
    release.api.delete(path)


def test_uninstall_leaves_the_definition_and_what_people_made(uninstalled: Uninstalled) -> None:
    api = uninstalled.release.api
    assert [item["kind"] for item in render() if exists(api, item)] == ["CustomResourceDefinition"] * 3
    assert api.reachable(uninstalled.service)


def test_after_an_uninstall_namespaces_end(uninstalled: Uninstalled) -> None:
    """An APIService without a server would prevent the deletion of every namespace in the cluster."""
    api, name = uninstalled.release.api, f"after-{uuid4().hex[:6]}"
    api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    api.delete(f"/api/v1/namespaces/{name}")
    wait_until("its end", lambda: not api.reachable(f"/api/v1/namespaces/{name}"))


def test_the_kept_definition_is_taken_by_the_next_install_and_survives_its_toggle(
    uninstalled: Uninstalled, release: Release
) -> None:
    release.upgrade()
    release.upgrade("crds.create=false")
    assert release.api.reachable(CRD)
    assert release.api.reachable(uninstalled.service)


def test_kubernetes_own_roles_for_people_cover_inference_services(release: Release) -> None:
    release.upgrade()

    def may(role: str, verb: str, resource: str, group: str = "conveyor.dev") -> bool:
        """Return whether a user with one of Kubernetes' ClusterRoles may do this in the namespace `default`."""
        user = f"{role}-{uuid4().hex[:6]}"
        binding = {
            "metadata": {"name": user},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
        }
        release.api.create("/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings", binding)
        name, _, subresource = resource.partition("/")
        attributes = {"namespace": "default", "verb": verb, "group": group, "resource": name}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": {**attributes, "subresource": subresource}},
        }
        answer = release.api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    metric = "inferenceservices.conveyor.dev/inference_in_flight"
    granted = [
        ("view", "list", "inferenceservices"),
        ("view", "get", metric, "custom.metrics.k8s.io"),
        ("edit", "deletecollection", "inferenceservices"),
        ("edit", "patch", "inferenceservices/scale"),
        ("admin", "create", "inferenceservices"),
        ("view", "list", "servednames"),
        ("edit", "delete", "servednames"),
        ("view", "list", "apikeys"),
        ("edit", "create", "apikeys"),
    ]
    for access in granted:  # Kubernetes aggregates each role by itself, some time after the install
        wait_until(f"{access}", lambda access=access: may(*access))
    assert not may("view", "create", "inferenceservices")
    assert not may("admin", "patch", "inferenceservices/status")
    assert not [verb for verb in ("create", "update", "patch") if may("admin", verb, "servednames")]
