"""Tests two releases in one cluster, each for its own namespaces, as docs/operations.md describes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.chart.installation import CHART, HelmFailed, Json, Release, helm, render, running_operator
from tests.operator.stage import Space

from conveyor_api.names import OPERATOR_LEASE
from e2e.cluster.api import wait_until
from e2e.cluster.paths import REPOSITORY

pytestmark = pytest.mark.slow

SECOND = "conveyor-b"


def read_values() -> str:
    """Return the page's values for the second release."""
    page = (REPOSITORY / "docs/operations.md").read_text()
    shown = re.search(r"^```yaml\n(# The second release.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert shown
    return shown[1]


@pytest.fixture
def second(release: Release, tmp_path: Path) -> Iterator[list[Json]]:
    """Install both releases. Returns the objects of the second one."""
    for namespace in (SECOND, "team-a", "team-b"):
        release.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    values = tmp_path / "second.yaml"
    values.write_text(read_values())
    where = (SECOND, CHART, "--namespace", SECOND, "--values", values)
    release.upgrade("watchNamespaces={team-a}")
    helm("install", *where, kubeconfig=release.plane.kubeconfig)
    yield [item for item in yaml.safe_load_all(helm("template", *where)) if item]
    if SECOND in helm("list", "--short", "-n", SECOND, kubeconfig=release.plane.kubeconfig).split():
        helm("uninstall", SECOND, "--namespace", SECOND, kubeconfig=release.plane.kubeconfig)
    for namespace in (SECOND, "team-a", "team-b"):
        release.api.delete(f"/api/v1/namespaces/{namespace}")


def gateway_of(space: Space, service: str) -> str:
    return str((space.get("Service", service) or {}).get("spec", {}).get("externalName"))


def test_each_serves_its_own_namespaces_and_survives_the_other(
    release: Release, second: list[Json], tmp_path: Path
) -> None:
    spaces = {"conveyor-system": Space(release.api, "team-a"), SECOND: Space(release.api, "team-b")}
    plane, first = release.plane, render("watchNamespaces={team-a}")
    with running_operator(plane, first, tmp_path) as check_first:
        with running_operator(plane, second, tmp_path) as check_second:
            wait_until("the kind", lambda: release.api.reachable(spaces[SECOND].path("InferenceService")), check_first)
            for system, space in spaces.items():
                space.make_service("qwen")
                gateway = f"conveyor-gateway.{system}.svc.cluster.local"
                wait_until(
                    f"its gateway, {gateway}",
                    lambda space=space, gateway=gateway: gateway_of(space, "qwen") == gateway,
                    lambda: check_first() or check_second(),
                )
                assert Space(release.api, system).need("Lease", OPERATOR_LEASE)["spec"]["holderIdentity"]
        helm("uninstall", SECOND, "--namespace", SECOND, kubeconfig=plane.kubeconfig)
        spaces["conveyor-system"].make_service("after")
        spaces["conveyor-system"].wait_children("after", 60)


def test_a_second_release_as_the_first_is_refused_and_leaves_the_first(release: Release, tmp_path: Path) -> None:
    release.upgrade()
    release.api.create("/api/v1/namespaces", {"metadata": {"name": "conveyor-c"}})
    with pytest.raises(HelmFailed, match="cannot be imported into the current release"):
        helm("install", "c", CHART, "--namespace", "conveyor-c", kubeconfig=release.plane.kubeconfig)
    assert release.api.get("/apis/rbac.authorization.k8s.io/v1/clusterroles/conveyor-operator")
    release.api.delete("/api/v1/namespaces/conveyor-c")


def test_nothing_of_the_second_for_the_whole_cluster_has_a_name_of_the_first() -> None:
    names = {(item["kind"], item["metadata"]["name"]) for item in render() if "namespace" not in item["metadata"]}
    text = helm("template", SECOND, CHART, "--namespace", SECOND, "--set", "crds.create=false,userRoles.create=false")
    objects = [item for item in yaml.safe_load_all(text) if item and "namespace" not in item["metadata"]]
    both = names & {(item["kind"], item["metadata"]["name"]) for item in objects}
    assert {name for _, name in both} == {"conveyor-operator-metrics-api"}, "one cluster has one metrics API"
