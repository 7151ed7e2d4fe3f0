"""Tests what a team can do that has the role `edit` in its own namespace and no other rights."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chart.installation import AuditedControlPlane, CommandFailed, Release
from tests.operator.stage import wait_until

from conveyor_api import names
from conveyor_kubectl.command import main
from e2e.cluster.api import Api
from e2e.cluster.paths import REPOSITORY

pytestmark = pytest.mark.slow

TEAM = "team-a"
NAMES = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{TEAM}/{names.SERVED_NAME_PLURAL}"
SERVICES = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{TEAM}/inferenceservices"
PAGE = (REPOSITORY / "docs/operations.md").read_text()
(IMAGE,) = re.findall("^IMAGE=.*$", (REPOSITORY / "docs/jobs.md").read_text(), re.MULTILINE)
(ROLE,) = re.findall(r"```yaml\n([^`]*name: tuners.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def developer(chart_plane: AuditedControlPlane, release: Release) -> Iterator[Path]:
    """The kubeconfig of a user of the team, in a cluster with the chart and a service of the team."""
    release.upgrade()
    release.shell(f"kubectl create namespace {TEAM}")
    release.shell(f"kubectl -n {TEAM} create rolebinding dev --clusterrole=edit --group={TEAM}")
    kubeconfig = chart_plane.issue_kubeconfig("developer", "developer", TEAM)
    api = Api(kubeconfig)
    wait_until("the team's rights", lambda: api.reachable(SERVICES))
    body = {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": "InferenceService",
        "metadata": {"name": "chat"},
        "spec": {"model": {"uri": "hf://a/b"}},
    }
    api.create(SERVICES, body)
    yield kubeconfig
    release.shell(f"kubectl delete namespace {TEAM} --timeout=60s")


def test_a_team_learns_the_image_of_its_jobs(release: Release, developer: Path) -> None:
    read = f"export KUBECONFIG={developer}; {IMAGE}; echo $IMAGE"
    deployment = release.api.get(f"/apis/apps/v1/namespaces/{names.SYSTEM_NAMESPACE}/deployments/conveyor-gateway")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert release.shell(read).strip() == container["image"]
    with pytest.raises(CommandFailed, match="forbidden"):
        release.shell(f"export KUBECONFIG={developer}; kubectl -n conveyor-system get configmaps")
    release.upgrade("userRoles.create=false")
    with pytest.raises(CommandFailed, match="forbidden"):
        release.shell(read)


def test_the_page_lists_the_names_that_nobody_uses(release: Release, developer: Path) -> None:
    for name in ("chat", "trial"):  # as the operator claims them; `trial` was deleted since
        body = {"apiVersion": f"{names.GROUP}/{names.VERSION}", "kind": names.SERVED_NAME_KIND}
        release.api.create(NAMES, body | {"metadata": {"name": f"n-{name}"}, "spec": {"name": name}})
    (listing,) = re.findall(r"```sh\n(comm .*?)```", PAGE, re.DOTALL)
    assert release.shell(f"export KUBECONFIG={developer}; {listing}").split() == ["trial"]


def test_a_tune_begins_only_with_the_right_to_send_requests(
    release: Release, developer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = ["tune", "chat", "-n", TEAM, f"--kubeconfig={developer}", "--replica", "--objective=latency=1s"]
    assert main(tune) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "you may not read the Service conveyor-gateway in conveyor-system and create its services/proxy" in line
    assert "--url http://conveyor-gateway.conveyor-system" in line
    assert [each["metadata"]["name"] for each in release.api.get(SERVICES)["items"]] == ["chat"]
    release.shell(f"kubectl apply -f - <<'END'\n{ROLE}END")
    assert main([*tune, "--dry-run"]) == 0
    assert "measures a copy of chat, chat-tune" in capsys.readouterr().out
    release.upgrade("gateway.tls.secretName=gateway-tls")
    assert main([*tune, "--dry-run"]) == 0, "the Service has port 443 alone, and the proxy needs the scheme"
