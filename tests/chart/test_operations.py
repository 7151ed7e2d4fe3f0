"""Runs the documentation's commands for the chart, the CRD and services, exactly as the pages have them."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.chart.installation import CHART, CommandFailed, HelmFailed, Release
from tests.chart.test_release import CRD, SERVICES

from conveyor_api.names import CRD_NAME, SYSTEM_NAMESPACE
from e2e.cluster.api import wait_until
from e2e.cluster.paths import REPOSITORY

pytestmark = pytest.mark.slow

PAGE = (REPOSITORY / "docs/operations.md").read_text()
DEPLOYMENT = f"/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/deployments/conveyor-gateway"
CRD_BY_HAND = "kubectl apply --server-side --field-manager=helm --force-conflicts -f crds/"
ONE_VALUE = (
    "helm upgrade conveyor charts/conveyor -n conveyor-system --reset-then-reuse-values --set gateway.replicas=3"
)


def short_names(release: Release) -> list[str]:
    return list(release.api.get(CRD)["spec"]["names"]["shortNames"])


def explain(release: Release) -> str:
    """Return the fields, or kubectl's error while the API server does not know them yet."""
    try:
        return release.shell("kubectl explain infsvc.spec --recursive")
    except CommandFailed as error:
        return str(error)


def test_a_rollback_brings_the_earlier_deployments_and_definition(release: Release, tmp_path: Path) -> None:
    newer = shutil.copytree(CHART, tmp_path / "newer")
    crd = newer / "templates" / "crd.yaml"
    crd.write_text(crd.read_text().replace("[infsvc]", "[infsvc, newer]"))
    release.upgrade("gateway.replicas=3")
    release.upgrade("gateway.replicas=4", chart=newer)
    assert short_names(release) == ["infsvc", "newer"]
    release.shell("helm rollback conveyor -n conveyor-system")
    assert short_names(release) == ["infsvc"]
    assert release.api.get(DEPLOYMENT)["spec"]["replicas"] == 3


def test_the_page_s_uninstall_ends_after_the_last_pod(release: Release) -> None:
    """A finalizer keeps a pod, as a kubelet does while the pod's processes end."""
    release.upgrade()
    pods = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods"
    wait_until("all pods", lambda: len(release.api.get(pods)["items"]) == 6)
    kept = f"{pods}/{release.api.get(pods)['items'][0]['metadata']['name']}"
    release.api.patch_json(kept, [{"op": "add", "path": "/metadata/finalizers", "value": ["example.com/ends-slowly"]}])
    (uninstall,) = re.findall(r"```sh\n(helm uninstall .*?)```", PAGE, re.DOTALL)
    with ThreadPoolExecutor(1) as thread:
        command = thread.submit(release.shell, uninstall)
        try:
            wait_until("the pod's end", lambda: "deletionTimestamp" in release.api.get(kept)["metadata"])
            wait_until("the end of the other pods", lambda: len(release.api.get(pods)["items"]) == 1)
            wait_until("Helm's end", lambda: release.shell(f"helm list --short -n {SYSTEM_NAMESPACE}") == "")
            assert not command.done(), "it returned before the last pod's end"
        finally:
            release.api.patch_json(kept, [{"op": "remove", "path": "/metadata/finalizers"}])
        command.result(timeout=60)
    assert release.api.get(pods)["items"] == []


def test_one_value_is_changed_and_the_others_are_kept(release: Release) -> None:
    release.upgrade("gateway.logLevel=debug")
    release.shell(ONE_VALUE)
    assert release.api.get(DEPLOYMENT)["spec"]["replicas"] == 3
    assert "--log-level=debug" in str(release.api.get(DEPLOYMENT)["spec"]["template"])


def test_a_definition_that_was_changed_by_hand_stops_an_upgrade_until_helm_owns_it_again(release: Release) -> None:
    release.upgrade()
    edited = f"sed 's/infsvc/byhand/' crds/{CRD_NAME}.yaml"
    release.shell(f"{edited} | kubectl apply --server-side --force-conflicts -f -")
    with pytest.raises(HelmFailed, match="conflict"):
        release.upgrade()
    release.shell(CRD_BY_HAND)
    release.upgrade()
    assert short_names(release) == ["infsvc"]


def test_take_ownership_adopts_a_definition_that_was_applied_by_hand(release: Release) -> None:
    release.shell(CRD_BY_HAND)
    with pytest.raises(HelmFailed, match="cannot be imported into the current release"):
        release.upgrade()
    release.upgrade(more=["--take-ownership"])
    release.upgrade()


def test_services_are_looked_at_saved_deleted_and_brought_back(release: Release, tmp_path: Path) -> None:
    release.upgrade()
    wait_until("the kind's name and fields", lambda: "maxBatchSize" in explain(release))
    release.shell("kubectl apply -f examples/qwen.yaml")
    assert "Max Model Len" in release.shell("kubectl describe infsvc qwen")
    release.shell("kubectl get infsvc,servednames,apikeys -A -o yaml > conveyor.yaml", tmp_path)
    release.shell("kubectl delete infsvc -A --all")
    assert not release.api.reachable(f"{SERVICES}/qwen")
    release.shell("kubectl apply -f conveyor.yaml", tmp_path)
    assert release.api.reachable(f"{SERVICES}/qwen")
    release.shell("helm uninstall conveyor -n conveyor-system")
    delete = "kubectl delete crd inferenceservices.conveyor.dev servednames.conveyor.dev apikeys.conveyor.dev"
    wait_until("the end of the policy", lambda: not refusal(release, f"{delete} --dry-run=server"))
    release.shell(delete)
    wait_until("the end of the kind", lambda: not release.api.reachable(SERVICES))


def test_a_definition_is_deleted_only_if_somebody_allowed_it(release: Release) -> None:
    """A dry run, because a deleted definition would take the services of other tests along."""
    release.upgrade()
    delete = f"kubectl delete crd {CRD_NAME} --dry-run=server"
    wait_until("the policy", lambda: "all engines; to allow it: kubectl annotate" in refusal(release, delete))
    release.shell(f"kubectl annotate crd {CRD_NAME} conveyor.dev/allow-deletion=true")
    wait_until("permission", lambda: not refusal(release, delete))
    release.shell(f"kubectl annotate crd {CRD_NAME} conveyor.dev/allow-deletion-")


def refusal(release: Release, command: str) -> str:
    try:
        release.shell(command)
    except CommandFailed as error:
        return str(error)
    return ""


@pytest.mark.parametrize("namespace", ["default", "kube-public"])
def test_the_service_of_the_notes_is_made_as_it_was_pasted(namespace: str, release: Release) -> None:
    values = () if namespace == "default" else (f"watchNamespaces={{{namespace}}}",)
    pasted = re.search(r"^ *kubectl apply -f - <<EOF\n.*?^EOF\n", release.upgrade(*values), re.DOTALL | re.MULTILINE)
    assert pasted
    wait_until("the kind", lambda: "maxBatchSize" in explain(release))
    release.shell(pasted[0])
    release.shell(f"kubectl delete infsvc qwen -n {namespace}")


def test_a_platform_s_values_are_taken(release: Release, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/operations.md").read_text()
    shown = re.search(r"^```yaml\n(imageRegistry: .*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert shown
    values = tmp_path / "values.yaml"
    values.write_text(shown[1])
    release.upgrade(more=["--values", str(values)])
    (container,) = release.api.get(DEPLOYMENT)["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.example.com/conveyor/control:")
    service = release.api.get(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/services/conveyor-gateway")["spec"]
    assert service["loadBalancerSourceRanges"] == ["203.0.113.0/24"]


def test_the_values_behind_a_proxy_are_taken(release: Release, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/expose.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(gateway:\n.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "values.yaml").write_text(shown)
    release.upgrade(more=["--values", str(tmp_path / "values.yaml")])
    operator = release.api.get(DEPLOYMENT.replace("gateway", "operator"))
    assert "https://models.example.com" in str(operator["spec"]["template"])
    assert "10.244.7.0/28" in str(release.api.get(DEPLOYMENT)["spec"]["template"])


def test_the_page_for_a_real_cluster_is_taken(release: Release, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/real-cluster.md").read_text()
    shown = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0]
    (tmp_path / "service.yaml").write_text(shown)
    release.upgrade()
    wait_until("the kind's name and fields", lambda: "maxBatchSize" in explain(release))
    release.api.create("/api/v1/namespaces", {"metadata": {"name": "team-a"}})
    release.shell("kubectl apply -f service.yaml", tmp_path)
    assert "llama" in release.shell("kubectl get inferenceservices.conveyor.dev -n team-a -o name")
    release.api.delete("/api/v1/namespaces/team-a")
