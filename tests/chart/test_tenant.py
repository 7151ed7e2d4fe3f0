"""Tests that a team with the role `admin` in one namespace installs a release there, as docs/operations.md says."""

import re
from pathlib import Path

import pytest
import yaml
from tests.chart.installation import CHART, HelmFailed, Release, helm, render, running_operator
from tests.operator.stage import Space

from e2e.cluster.api import wait_until
from e2e.cluster.definitions import install_definitions
from e2e.cluster.paths import REPOSITORY

pytestmark = pytest.mark.slow

TEAM = "team-c"
PAGE = (REPOSITORY / "docs/operations.md").read_text()
(INSTALLER,) = re.findall(r"```yaml\n([^`]*name: conveyor-installer.*?)```", PAGE, re.DOTALL)
(VALUES,) = re.findall(r"```yaml\n(# helm install conveyor [^`]*)```", PAGE)


@pytest.fixture
def team(release: Release, tmp_path: Path) -> Path:
    """The team's kubeconfig, with the rights that the page gives."""
    install_definitions(release.api)
    release.shell(f"kubectl create namespace {TEAM}")
    release.shell(f"kubectl apply -f - <<'END'\n{INSTALLER}END")
    for role in ("admin", "conveyor-installer"):
        release.shell(f"kubectl -n {TEAM} create rolebinding {role} --clusterrole={role} --group={TEAM}")
    (tmp_path / "values.yaml").write_text(VALUES)
    return release.plane.issue_kubeconfig("tenant", "tenant", TEAM)


def test_an_administrator_of_one_namespace_installs_a_release_for_it(
    release: Release, team: Path, tmp_path: Path
) -> None:
    def run(verb: str, *values: str) -> str:
        where = ("conveyor", CHART, "--namespace", TEAM, "--values", tmp_path / "values.yaml")
        return helm(verb, *where, *values, kubeconfig=team)

    with pytest.raises(HelmFailed, match='cannot get resource "clusterroles"'):
        run("install", "--set-json=watchNamespaces=[]")
    helm("uninstall", "conveyor", "--namespace", TEAM, "--ignore-not-found", kubeconfig=team)
    run("install")
    run("upgrade", "--set=gateway.replicas=3")
    rendered = [item for item in yaml.safe_load_all(run("template")) if item]
    assert all(item["metadata"]["namespace"] == TEAM for item in rendered)
    space = Space(release.api, TEAM)
    with running_operator(release.plane, rendered, tmp_path) as check:
        space.make_service("qwen")
        wait_until("its children", lambda: check() or space.get("PodDisruptionBudget", "qwen-engine"), check)
    helm("uninstall", "conveyor", "--namespace", TEAM, kubeconfig=team)


@pytest.mark.parametrize("namespaces", ["{team-a}", "{team-a,team-b}"])
def test_with_a_list_of_namespaces_no_right_for_services_is_for_the_whole_cluster(namespaces: str) -> None:
    rendered = render(f"watchNamespaces={namespaces}", "metrics.enabled=false", "userRoles.create=false")
    assert not {item["kind"] for item in rendered} & {"ClusterRole", "ClusterRoleBinding"}
    roles = {
        item["metadata"]["namespace"] for item in rendered if item["metadata"]["name"] == "conveyor-operator-services"
    }
    assert roles == set(namespaces.strip("{}").split(","))
