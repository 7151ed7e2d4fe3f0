"""`helm uninstall` leaves a healthy cluster, and what was served goes on being served by its pods."""

import pytest

from e2e import kube
from e2e.deploy import deploy
from e2e.services import service


@pytest.mark.disturbs
@pytest.mark.takes_the_chart_away
def test_uninstall_leaves_no_dead_apiservice_and_no_stuck_namespace(namespace: str) -> None:
    kube.apply(service("stays"), namespace)
    kube.wait_ready("stays", namespace)
    kube.helm("uninstall", "conveyor", "-n", kube.SYSTEM_NAMESPACE, "--wait")
    kube.wait_until("no APIService of ours", lambda: not custom_metrics_apiservices(), 60)
    kube.kubectl("create", "namespace", "after-uninstall")
    kube.kubectl("delete", "namespace", "after-uninstall", "--timeout=60s")
    # The CRD is kept, so is the service, and its engine runs on.
    assert kube.get("infsvc", "stays", namespace) is not None
    deployment = kube.get("deployment", "stays-engine", namespace)
    assert deployment is not None
    assert deployment["status"]["readyReplicas"] == 1
    kube.kubectl("delete", "infsvc", "stays", "-n", namespace, "--timeout=60s")  # no finalizer holds it
    kube.kubectl("delete", "namespace", kube.SYSTEM_NAMESPACE, "--timeout=120s")
    deploy()  # and it comes back under the same name
    assert "conveyor-gateway" in kube.helm("test", "conveyor", "-n", kube.SYSTEM_NAMESPACE, "--logs")


def custom_metrics_apiservices() -> list[str]:
    names = kube.kubectl("get", "apiservices", "-o", "name").split()
    return [name for name in names if name.endswith(".custom.metrics.k8s.io")]
