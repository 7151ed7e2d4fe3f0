"""Tests that the operator's account cannot use its roles for objects that are not children of InferenceServices.

All calls are made as the operator's ServiceAccount on a real API server. `test_rbac` shows that nothing that the
operator does is refused.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.installation import Json, Release
from tests.kubectl import kubectl
from tests.operator.stage import wait_until

from conveyor_api.names import INFERENCE_SERVICE_LABEL, SYSTEM_NAMESPACE, USAGE_NAME

pytestmark = pytest.mark.slow

OPERATOR = f"system:serviceaccount:{SYSTEM_NAMESPACE}:conveyor-operator"
OURS = {INFERENCE_SERVICE_LABEL: "qwen"}
SAFE = {"allowPrivilegeEscalation": False}
CONTAINER = {"name": "engine", "image": "a", "securityContext": SAFE}
POD: Json = {"automountServiceAccountToken": False, "containers": [CONTAINER]}
NO_CHILD = "may only write objects with the label"
TOKEN = "token of a ServiceAccount or a folder of the node"
PRIVILEGES = "in the node's namespaces or with privileges"


def build_map(labels: dict[str, str] | None = None, **metadata: Any) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "labels": labels or {}, **metadata}}


def build_deployment(**pod: Any) -> Json:
    template = {"metadata": {"labels": OURS}, "spec": POD | pod}
    spec = {"selector": {"matchLabels": OURS}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a", "labels": OURS}, "spec": spec}


class Operator:
    """The cluster as the operator's account sees it. Writes are dry runs."""

    def __init__(self, release: Release, folder: Path) -> None:
        self._kubeconfig, self._file = release.plane.kubeconfig, folder / "object.yaml"

    def run(self, *command: str, body: Json | None = None, namespace: str = "default") -> str:
        """Return the output of kubectl, or the error of the API server."""
        options = ["--dry-run=server", f"--as={OPERATOR}"]
        if body is not None:
            self._file.write_text(yaml.safe_dump(body))
            options += ["--filename", str(self._file)]
        try:
            return kubectl(self._kubeconfig, namespace, *command, *options)
        except subprocess.CalledProcessError as error:
            return str(error.stderr)

    def apply(self, body: Json, namespace: str = "default") -> str:
        flags = ("--server-side", "--force-conflicts", "--field-manager=conveyor")
        return self.run("apply", *flags, body=body, namespace=namespace)


def test_the_operator_writes_children_and_nothing_else(release: Release, tmp_path: Path) -> None:
    release.upgrade("metrics.enabled=false")
    operator = Operator(release, tmp_path)
    wait_until("the policy", lambda: NO_CHILD in operator.apply(build_map()))
    assert "serverside-applied" in operator.apply(build_map(OURS))

    kubectl(release.plane.kubeconfig, "default", "create", "configmap", "a")
    assert NO_CHILD in operator.apply(build_map(OURS)), "a label does not make another's object a child"
    assert NO_CHILD in operator.run("delete", "configmap", "a")
    for body in (build_deployment(), build_deployment(volumes=[{"name": "a", "emptyDir": {}}])):
        assert "serverside-applied" in operator.apply(body)
    tokens = [{"name": "a", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}]
    for pod, sentence in (
        ({"automountServiceAccountToken": True}, TOKEN),
        ({"volumes": tokens}, TOKEN),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, TOKEN),
        ({"hostNetwork": True}, PRIVILEGES),
        ({"hostPID": True}, PRIVILEGES),
        ({"containers": [CONTAINER | {"securityContext": {"privileged": True}}]}, PRIVILEGES),
        ({"initContainers": [{"name": "a", "image": "a"}]}, PRIVILEGES),
    ):
        assert sentence in operator.apply(build_deployment(**pod)), pod


def test_the_operator_keeps_usage_in_its_own_namespace_only(release: Release, tmp_path: Path) -> None:
    release.upgrade("metrics.enabled=false")
    operator = Operator(release, tmp_path)
    wait_until("the policy", lambda: NO_CHILD in operator.apply(build_map()))
    usage = build_map(name=USAGE_NAME)
    assert "serverside-applied" in operator.apply(usage, SYSTEM_NAMESPACE)
    assert NO_CHILD in operator.apply(usage)
    assert NO_CHILD in operator.apply(build_map(name="else"), SYSTEM_NAMESPACE)


def test_a_child_that_lost_its_label_is_still_a_child(release: Release, tmp_path: Path) -> None:
    release.upgrade("metrics.enabled=false")
    operator = Operator(release, tmp_path)
    wait_until("the policy", lambda: NO_CHILD in operator.apply(build_map()))
    owner = {"apiVersion": "conveyor.dev/v1alpha1", "kind": "InferenceService", "name": "qwen", "uid": "a"}
    file = tmp_path / "child.yaml"
    file.write_text(yaml.safe_dump(build_map(name="stripped", ownerReferences=[owner])))
    kubectl(release.plane.kubeconfig, "default", "create", "--filename", str(file))
    assert "serverside-applied" in operator.apply(build_map(OURS, name="stripped"))
    assert "deleted" in operator.run("delete", "configmap", "stripped")
