"""Tests that the API server itself refuses an apply that must create its object, if the object exists."""

from typing import Any

import pytest
from tests.operator.builders import build
from tests.operator.stage import Space

from conveyor_kube.kubeconfig import load_configuration
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import Conflict
from conveyor_operator.inferenceservice.kinds import CHILDREN
from conveyor_operator.metrics import Metrics
from e2e.cluster.control_plane import ControlPlane

KINDS = {kind.kind: kind for kind in CHILDREN}
BODIES = {
    kind: body
    for spec in (
        {"autoscaling": {"minReplicas": 1, "maxReplicas": 2}},
        {"model": {"uri": "hf://example/model", "cache": {"strategy": "PVC", "size": "1Gi"}}},
    )
    for (kind, _), body in build(**spec).items()
}


@pytest.mark.parametrize("kind", sorted(BODIES))
async def test_an_apply_that_must_create_an_object_changes_none(
    kind: str, space: Space, control_plane: ControlPlane
) -> None:
    metadata: dict[str, Any] = {"name": "new", "namespace": space.namespace}
    body = {**BODIES[kind], "metadata": metadata}
    async with Cluster(await load_configuration(str(control_plane.kubeconfig)), Metrics()) as cluster:
        made = await cluster.apply(KINDS[kind], body, "first", must_be_new=True)
        assert made["metadata"]["managedFields"][0]["operation"] == "Apply"
        with pytest.raises(Conflict):
            await cluster.apply(
                KINDS[kind], {**body, "metadata": {**metadata, "labels": {"a": "b"}}}, "second", must_be_new=True
            )
    assert "a" not in (space.need(kind, "new")["metadata"].get("labels") or {})
