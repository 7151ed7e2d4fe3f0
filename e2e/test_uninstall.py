"""Who serves custom.metrics.k8s.io when another adapter comes after us, we leave, and we come back after it.

`other_adapter.py` runs as a pod, and has its own HPA. Whoever owns the API group, that owner's HPAs scale, namespaces
can be deleted and engines keep running. Both stories share one service and one adapter.
"""

import base64
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e import kube, other_adapter
from e2e.cluster.certificates import Authority
from e2e.deploy import install, wait_registered
from e2e.services import quickstart, service
from e2e.test_quickstart import commands, shell

pytestmark = [pytest.mark.alone, pytest.mark.nightly]

NAME = "other-adapter"
API_SERVICE = "v1beta1.custom.metrics.k8s.io"
_PORT = 8443
_FILES = "/etc/adapter"


@pytest.fixture(scope="module")
def ours(shared_namespace: str) -> str:
    """The namespace of a service that scales on its queue."""
    body = quickstart()
    body["metadata"]["name"] = "ours"
    kube.apply(body, shared_namespace)
    kube.wait_ready("ours", shared_namespace)
    wait_scaling(shared_namespace, "ours scale", "ScalingActive")
    return shared_namespace


@pytest.fixture(scope="module")
def adapter(ours: str) -> Iterator[dict[str, Any]]:
    """Start the adapter's pod and create its HPA. Yields the APIService that registers the adapter.

    The API group is ours again afterwards.
    """
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder), "other-authority")
        pair = authority.issue("other", NAME, names=[f"{NAME}.{ours}.svc"])
        files = {"tls.crt": pair.certificate.read_text(), "tls.key": pair.key.read_text()}
        bundle = base64.b64encode(authority.certificate.read_bytes()).decode()
    files["adapter.py"] = Path(other_adapter.__file__).read_text()
    command = ["python", f"{_FILES}/adapter.py", str(_PORT), f"{_FILES}/tls.crt", f"{_FILES}/tls.key"]
    volume = {"name": "files", "secret": {"secretName": NAME}}
    of_pods = {"selector": {"app": NAME}, "ports": [{"name": "https", "port": 443, "targetPort": _PORT}]}
    objects = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}, "stringData": files},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}, "spec": of_pods},
        build_deployment(NAME, command, volume),
        build_deployment("theirs", ["python", "-c", "import time; time.sleep(3600)"], volume),
        other_adapter.build_hpa("theirs"),
    ]
    kube.apply(objects, ours)
    kube.kubectl("rollout", "status", f"deployment/{NAME}", "-n", ours, "--timeout=90s")
    spec = {
        "group": "custom.metrics.k8s.io",
        "version": "v1beta1",
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "caBundle": bundle,
        "service": {"name": NAME, "namespace": ours, "port": 443},
    }
    body = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": API_SERVICE}}
    try:
        yield body | {"spec": spec}
    finally:
        if owner(API_SERVICE) == NAME:
            unregister()
        install()
        wait_registered()


def build_deployment(name: str, command: list[str], volume: dict[str, Any]) -> dict[str, Any]:
    """One restricted pod with Python, in the image that every node has: the operator's."""
    operator = kube.get("deployment", "conveyor-operator", kube.SYSTEM_NAMESPACE)
    assert operator is not None
    container = {
        "name": "python",
        "image": operator["spec"]["template"]["spec"]["containers"][0]["image"],
        "command": command,
        "volumeMounts": [{"name": volume["name"], "mountPath": _FILES, "readOnly": True}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if name == NAME:
        container["readinessProbe"] = {"tcpSocket": {"port": _PORT}, "periodSeconds": 1}
    restricted = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {"containers": [container], "volumes": [volume], "securityContext": restricted}
    pod["terminationGracePeriodSeconds"] = 0
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def test_an_adapter_that_comes_after_us_has_the_group_until_it_goes(ours: str, adapter: dict[str, Any]) -> None:
    kube.apply(adapter)
    kube.wait_until("ours is withdrawn", lambda: owner("v1beta2.custom.metrics.k8s.io") is None)
    wait_scaling(ours, "their owner is named", "MetricsAPIOwnedByOther")
    assert_theirs_scale_and_namespaces_end(ours)
    unregister()
    kube.wait_until("ours is back", lambda: owner(API_SERVICE) == "conveyor-metrics")
    wait_registered()
    wait_scaling(ours, "ours scale again", "ScalingActive")
    assert_namespaces_end()


def test_uninstall_leaves_no_trace_but_the_services_and_the_chart_comes_back(
    ours: str, adapter: dict[str, Any]
) -> None:
    """The chart comes back under the same name, first beside another owner of the API group, then as its owner."""
    kube.apply(service("leaves", pod={"nodeSelector": {"disk": "none"}}), ours)
    shell(commands("docs/operations.md", "## Uninstall\n")[0])
    assert kube.list_("pods", kube.SYSTEM_NAMESPACE) == []
    kube.wait_until("no APIService of ours", lambda: not custom_metrics_apiservices())
    assert_namespaces_end()
    assert_services_stay(ours)
    kube.kubectl("delete", "infsvc", "leaves", "-n", ours, "--timeout=60s")  # no finalizer holds it
    kube.kubectl("delete", "namespace", kube.SYSTEM_NAMESPACE, "--timeout=120s")

    kube.apply(adapter)  # before us
    install()
    wait_scaling(ours, "their owner is named", "MetricsAPIOwnedByOther")
    assert owner("v1beta2.custom.metrics.k8s.io") is None
    assert owner(API_SERVICE) == NAME
    assert_theirs_scale_and_namespaces_end(ours)
    unregister()
    wait_registered()
    assert "conveyor-gateway" in kube.helm("test", "conveyor", "-n", kube.SYSTEM_NAMESPACE, "--logs")


def assert_services_stay(namespace: str) -> None:
    """The CRD is kept, so is the service, and its engine runs on."""
    assert kube.get("infsvc", "ours", namespace) is not None
    deployment = kube.get("deployment", "ours-engine", namespace)
    assert deployment is not None
    assert deployment["status"]["readyReplicas"] == 1


def custom_metrics_apiservices() -> list[str]:
    names = kube.kubectl("get", "apiservices", "-o", "name").split()
    return [name for name in names if name.endswith(".custom.metrics.k8s.io")]


def owner(api_service: str) -> str | None:
    """The name of the Service behind an APIService, or None."""
    found = kube.get("apiservice", api_service)
    return None if found is None else found["spec"]["service"]["name"]


def unregister() -> None:
    kube.kubectl("delete", "apiservice", API_SERVICE)


def wait_scaling(namespace: str, what: str, reason: str) -> None:
    def found() -> bool:
        return kube.condition(kube.get("infsvc", "ours", namespace), "ScalingReady").get("reason") == reason

    kube.wait_until(what, found)


def assert_theirs_scale_and_namespaces_end(namespace: str) -> None:
    kube.kubectl("scale", "deployment/theirs", "-n", namespace, "--replicas=1")
    theirs = "deployment", "theirs", namespace
    kube.wait_until("their HPA scales", lambda: (kube.get(*theirs) or {})["spec"]["replicas"] == 3)
    assert_namespaces_end()


def assert_namespaces_end() -> None:
    kube.kubectl("create", "namespace", "short-lived")
    kube.kubectl("delete", "namespace", "short-lived", "--timeout=60s")
