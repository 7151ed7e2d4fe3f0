"""Tests `provider: External`: a user's own HPA scales the service, and the replicas stay when the provider changes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from tests.cli.kubectl.test_explained_service import Explained, count
from tests.metrics.aggregation import Aggregated, DemandServer
from tests.operator.stage import Space, wait_until

from e2e.cluster.paths import REPOSITORY

Json = dict[str, Any]


def read_blocks() -> Iterator[Json]:
    """Return the objects in docs/keda.md."""
    page = (REPOSITORY / "docs" / "keda.md").read_text()
    for block in page.split("```yaml\n")[1:]:
        yield from yaml.safe_load_all(block.split("```")[0])


def read_block(kind: str) -> Json:
    (found,) = (body for body in read_blocks() if body.get("kind") == kind)
    return found


@pytest.mark.slow
def test_an_hpa_of_ones_own_scales_and_switching_keeps_the_replicas(
    space: Space, aggregated: Aggregated, start_gateway: Callable[[dict[str, Json]], DemandServer]
) -> None:
    gateway = start_gateway({})
    aggregated.set_gateways(gateway)
    explained = Explained(space, aggregated.plane.kubeconfig, gateway)
    explained.set(70)
    space.create("InferenceService", read_block("InferenceService"))
    space.wait_condition("qwen", "ScalingReady", "True", "ExternalAutoscaler")
    assert count(space) == 1
    assert "no HorizontalPodAutoscaler for the Deployment" in explained.explain()
    space.create("HorizontalPodAutoscaler", read_block("HorizontalPodAutoscaler"))
    wait_until("70 / 24 -> 3", lambda: count(space) == 3)
    assert "HorizontalPodAutoscaler mine, which Conveyor did not create, sets the replicas" in explained.explain()
    assert [hpa["metadata"]["name"] for hpa in space.list("HorizontalPodAutoscaler")] == ["mine"]
    space.delete("HorizontalPodAutoscaler", "mine")
    switch(space, {"provider": "Native"}, "ScalingActive", 3)  # 70 / 24 -> 3
    gateway.status = 503  # so that nobody scales while it changes hands
    switch(space, {"provider": "External"}, "ExternalAutoscaler", 3)
    assert not space.list("HorizontalPodAutoscaler")
    switch(space, None, "FixedReplicas", 3)


def switch(space: Space, autoscaling: Json | None, reason: str, replicas: int) -> None:
    space.edit("qwen", autoscaling=autoscaling)
    space.wait_observed("qwen")
    space.wait_condition("qwen", "ScalingReady", "True", reason)
    assert count(space) == replicas
