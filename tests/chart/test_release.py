"""Install, upgrade and uninstall, by Helm on a real control plane, with the real operator at work in between."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from tests.chart.installation import (
    API_SERVICES,
    AuditedControlPlane,
    HelmFailed,
    Json,
    Release,
    path_of,
    read_secret,
    render,
    running_operator,
)

from conveyor_api.names import CRD_NAME, METRICS_TLS_SECRET, METRICS_VERSIONS
from e2e.cluster.api import Api, ApiError, wait_until

CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}"
SERVICES = "/apis/conveyor.dev/v1alpha1/namespaces/default/inferenceservices"


def exists(api: Api, item: Json) -> bool:
    try:
        return api.reachable(path_of(api, item))
    except (ApiError, StopIteration):  # its kind is not served any more
        return False


def test_an_upgrade_keeps_the_certificate_and_the_trust_in_it(release: Release, tmp_path: Path) -> None:
    release.upgrade()
    assert read_secret(release.api, METRICS_TLS_SECRET) == {}
    assert release.ca_bundles() == {None}
    with running_operator(release.plane, render(), tmp_path) as check:
        wait_until("the Secret", lambda: bool(read_secret(release.api, METRICS_TLS_SECRET)), 60, check)
        wait_until("the caBundles", lambda: None not in release.ca_bundles(), 30, check)
    secret, bundles = read_secret(release.api, METRICS_TLS_SECRET), release.ca_bundles()
    assert secret.keys() >= {"tls.crt", "tls.key", "ca.crt"}
    assert len(bundles) == 1
    for values in (("gateway.replicas=3",), ()):
        release.upgrade(*values)
        assert read_secret(release.api, METRICS_TLS_SECRET) == secret
        assert release.ca_bundles() == bundles


@dataclass
class Uninstalled:
    """What an uninstall took, in its order, and an InferenceService that was there before."""

    release: Release
    deleted: list[str]
    service: str


@pytest.fixture(scope="module")
def uninstalled(chart_plane: AuditedControlPlane) -> Iterator[Uninstalled]:
    release = Release(chart_plane)
    release.upgrade()
    wait_until("the CRD", lambda: release.api.reachable(SERVICES), 20, lambda: None)
    service = {
        "apiVersion": "conveyor.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": f"kept-{uuid4().hex[:6]}"},
        "spec": {"model": {"uri": "pvc://models/tiny"}},
    }
    path = f"{SERVICES}/{release.api.create(SERVICES, service)['metadata']['name']}"
    before = len(chart_plane.read_audit("admin"))
    release.uninstall()
    deleted = [event["objectRef"]["resource"] for event in chart_plane.read_audit("admin")[before:]]
    yield Uninstalled(release, deleted, path)
    release.api.delete(path)


def test_uninstall_leaves_the_definition_and_what_people_made(uninstalled: Uninstalled) -> None:
    api = uninstalled.release.api
    assert [item["kind"] for item in render() if exists(api, item)] == ["CustomResourceDefinition"]
    assert api.reachable(uninstalled.service)


def test_after_an_uninstall_namespaces_end(uninstalled: Uninstalled) -> None:
    """An API without a server would keep every namespace of the cluster from its end."""
    api, name = uninstalled.release.api, f"after-{uuid4().hex[:6]}"
    api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    api.delete(f"/api/v1/namespaces/{name}")
    wait_until("its end", lambda: not api.reachable(f"/api/v1/namespaces/{name}"), 60, lambda: None)


def test_uninstall_takes_the_api_services_before_what_serves_them(uninstalled: Uninstalled) -> None:
    deleted = uninstalled.deleted
    last = max(index for index, resource in enumerate(deleted) if resource == "apiservices")
    for resource in ("deployments", "services", "secrets", "serviceaccounts"):
        assert last < deleted.index(resource), deleted


def test_the_kept_definition_is_taken_by_the_next_install_and_survives_its_toggle(
    uninstalled: Uninstalled, release: Release
) -> None:
    release.upgrade()
    release.upgrade("crds.create=false")
    assert release.api.reachable(CRD)
    assert release.api.reachable(uninstalled.service)


def test_another_owner_of_the_metrics_api_keeps_it_until_it_goes(release: Release) -> None:
    foreign = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": "v1beta1.custom.metrics.k8s.io"},
        "spec": {
            "group": "custom.metrics.k8s.io",
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"name": "prometheus-adapter", "namespace": "monitoring"},
        },
    }
    path = release.api.create("/apis/apiregistration.k8s.io/v1/apiservices", foreign)["metadata"]["name"]
    path = f"/apis/apiregistration.k8s.io/v1/apiservices/{path}"
    try:
        release.upgrade()
        found = release.api_service("v1beta1")
        assert found is not None
        assert found["spec"]["service"]["name"] == "prometheus-adapter"
        assert release.api_service("v1beta2") is None
    finally:
        release.api.delete(path)
    wait_until("the end of the foreign one", lambda: release.api_service("v1beta1") is None, 20, lambda: None)
    release.upgrade()
    for version in METRICS_VERSIONS:
        found = release.api_service(version)
        assert found is not None
        assert found["spec"]["service"]["name"] == "conveyor-metrics"


def take_over(release: Release, version: str) -> None:
    """As `kubectl apply` of another adapter's manifest does."""
    name = f"{version}.custom.metrics.k8s.io"
    body = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": name},
        "spec": {"service": {"name": "prometheus-adapter", "namespace": "monitoring"}},
    }
    release.api.apply(f"{API_SERVICES}/{name}", body)


@pytest.mark.parametrize("versions", [METRICS_VERSIONS[:1], METRICS_VERSIONS], ids=["one", "both"])
@pytest.mark.parametrize("values", [(), ("metrics.apiService.create=false",)], ids=["registered", "turned off"])
def test_an_upgrade_deletes_nothing_that_another_adapter_has_taken_over(
    release: Release, versions: tuple[str, ...], values: tuple[str, ...]
) -> None:
    release.upgrade()
    try:
        for version in versions:
            take_over(release, version)
        with pytest.raises(HelmFailed, match=r"of this release now points at somebody else.*resource-policy=keep"):
            release.upgrade(*values)
        for version in versions:
            name = f"{version}.custom.metrics.k8s.io"
            release.shell("kubectl annotate apiservice ... helm.sh/resource-policy=keep".replace("...", name))
        for _ in range(2):
            release.upgrade(*values)
            left = {version for version in METRICS_VERSIONS if release.api_service(version) is not None}
            assert left == set(versions)
    finally:
        for version in METRICS_VERSIONS:
            if release.api_service(version) is not None:
                release.api.delete(f"{API_SERVICES}/{version}.custom.metrics.k8s.io")


def test_kubernetes_own_roles_for_people_cover_inference_services(release: Release) -> None:
    release.upgrade()

    def may(role: str, verb: str, resource: str, group: str = "conveyor.dev") -> bool:
        """Whether a person bound to a ClusterRole of Kubernetes may do that in namespace default."""
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
    ]
    for access in granted:  # Kubernetes aggregates each role by itself, some time after the install
        wait_until(f"{access}", lambda access=access: may(*access), 20, lambda: None)
    assert not may("view", "create", "inferenceservices")
    assert not may("admin", "patch", "inferenceservices/status")
