"""Starts a control plane only for the chart, because the chart registers a cluster-wide API and the CRD."""

from collections.abc import Iterator

import pytest
from tests.chart.installation import RELEASE, AuditedControlPlane, Json, Release, helm, render

from conveyor_api.names import SYSTEM_NAMESPACE
from e2e.cluster.api import Api, wait_until


@pytest.fixture(scope="session")
def rendered() -> list[Json]:
    """The objects of the chart with its defaults."""
    return render()


@pytest.fixture(scope="module")
def chart_plane() -> Iterator[AuditedControlPlane]:
    """A control plane for each file, because these files run in parallel.

    When idle, it costs two seconds per minute.
    """
    with AuditedControlPlane(hpa_sync_period_seconds=1) as plane:
        namespace = {"metadata": {"name": SYSTEM_NAMESPACE, "labels": build_restricted_labels()}}
        api = Api(plane.kubeconfig)
        api.create("/api/v1/namespaces", namespace)
        account = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts/default"
        wait_until("the account of its pods", lambda: api.reachable(account), plane.processes.check)
        yield plane


@pytest.fixture
def api(chart_plane: AuditedControlPlane) -> Api:
    return Api(chart_plane.kubeconfig)


@pytest.fixture
def release(chart_plane: AuditedControlPlane) -> Iterator[Release]:
    """A release that is not installed yet. It is uninstalled after the test."""
    release = Release(chart_plane)
    yield release
    left = helm("list", "--short", "--namespace", SYSTEM_NAMESPACE, kubeconfig=chart_plane.kubeconfig)
    if RELEASE in left.split():
        release.uninstall()


def build_restricted_labels() -> dict[str, str]:
    return {"pod-security.kubernetes.io/enforce": "restricted"}
