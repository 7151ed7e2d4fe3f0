"""Tests that the operator follows the cluster after etcd was restored from an older snapshot.

Resource versions are lower than before. A watch that is resumed after its last version stays silent.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operator.stage import RunningOperator, Space, wait_until

from conveyor_operator.settings import Settings
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

NAMESPACE = "team"
RIGHT_SECONDS_MAX = 60


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    """A control plane of its own, because a restore changes it for all tests."""
    with ControlPlane() as plane:
        install_definitions(Api(plane.kubeconfig))
        yield plane


@pytest.fixture
def space(plane: ControlPlane) -> Space:
    api = Api(plane.kubeconfig)
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    return Space(api, NAMESPACE)


@pytest.fixture
def operator(plane: ControlPlane) -> Iterator[RunningOperator]:
    settings = Settings(
        engine_image="example/engine:1",
        watch_namespaces=(NAMESPACE,),
        kubeconfig=str(plane.kubeconfig),
        host="127.0.0.1",
        admin_port=0,
        metrics_api=False,
    )
    running = RunningOperator(settings)
    yield running
    running.stop()


@pytest.mark.slow
def test_an_operator_follows_a_cluster_whose_etcd_was_restored(
    plane: ControlPlane, space: Space, operator: RunningOperator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("kept", "back"):
        space.make_service(name)
        space.wait_children(name)
    plane.snapshot(tmp_path / "snapshot")
    space.delete("InferenceService", "back")
    space.make_service("lost")
    for number in range(50):
        space.edit("kept", queue={"maxRequests": 100 + number})
    for name in ("kept", "lost"):
        space.wait_observed(name)

    with caplog.at_level(logging.INFO, "conveyor_operator"):
        plane.restore(tmp_path / "snapshot")
        space.make_service("later")
        space.edit("kept", model={"name": "renamed"})
        space.delete("PodDisruptionBudget", "back-engine")

        space.wait_observed("later", RIGHT_SECONDS_MAX)
        space.wait_observed("kept", RIGHT_SECONDS_MAX)
        wait_until("the child is back", lambda: space.get("PodDisruptionBudget", "back-engine"), RIGHT_SECONDS_MAX)
    assert f"event=missed_deletion kind=InferenceService key={NAMESPACE}/lost" in caplog.text
