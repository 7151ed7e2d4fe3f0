"""A control plane for the chart alone: it takes the name of a cluster-wide API and of the CRD."""

from collections.abc import Iterator

import pytest
from tests.chart.installation import RELEASE, AuditedControlPlane, Json, Release, helm, render

from conveyor_api.names import SYSTEM_NAMESPACE
from e2e.cluster.api import Api, wait_until


@pytest.fixture(scope="session")
def rendered() -> list[Json]:
    """The chart with its defaults."""
    return render()


@pytest.fixture(scope="module")
def chart_plane() -> Iterator[AuditedControlPlane]:
    """Of a file, since the files of this folder run side by side, and idle it costs two seconds a minute."""
    with AuditedControlPlane(hpa_sync_period_seconds=1) as plane:
        namespace = {"metadata": {"name": SYSTEM_NAMESPACE, "labels": build_restricted_labels()}}
        api = Api(plane.kubeconfig)
        api.create("/api/v1/namespaces", namespace)
        account = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts/default"
        wait_until("the account of its pods", lambda: api.reachable(account), 60, plane.processes.check)
        yield plane


@pytest.fixture
def api(chart_plane: AuditedControlPlane) -> Api:
    return Api(chart_plane.kubeconfig)


@pytest.fixture
def release(chart_plane: AuditedControlPlane) -> Iterator[Release]:
    """Not installed yet; gone afterwards."""
    release = Release(chart_plane)
    yield release
    left = helm("list", "--short", "--namespace", SYSTEM_NAMESPACE, kubeconfig=chart_plane.kubeconfig)
    if RELEASE in left.split():
        release.uninstall()


def build_restricted_labels() -> dict[str, str]:
    return {"pod-security.kubernetes.io/enforce": "restricted"}
