"""Judges a service's conditions in a situation. Used by the tests of conditions."""

from dataclasses import replace
from typing import Any

from tests.operator.builders import (
    FORMER,
    NEWEST,
    ended,
    make_observed,
    make_pod,
    make_resource,
)

from conveyor_api.conditions import Reason
from conveyor_operator.inferenceservice.conditions import Judged, judge_all
from conveyor_operator.inferenceservice.observed import (
    DeploymentState,
)
from conveyor_operator.inferenceservice.pods import ContainerState, PodState
from conveyor_operator.inferenceservice.situation import Former, Situation
from conveyor_operator.loop.steps import Obstacle

LOADING = make_pod("pod", ended(code=0, reason="Completed", name="fetch"), ContainerState("engine", running=True))
READY = replace(LOADING, ready=True)
REFUSED = Obstacle("Deployment", "qwen-engine", Reason.CHILD_REFUSED, "Deployment qwen-engine: bad nodeSelector")
Obstacles = tuple[Obstacle, ...]


def judge(deployment: DeploymentState | None, *pods: PodState, **changes: Any) -> dict[str, Judged]:
    """Return the conditions of a situation. told: as for `make_situation`."""
    situation = make_situation(deployment, *pods, **changes)
    return {judged.type: judged for judged in judge_all(situation)}


def make_situation(
    deployment: DeploymentState | None,
    *pods: PodState,
    endpoints: int = 0,
    obstacles: Obstacles = (),
    template_generation: int = 0,
    refused: str = "",
    was_whole: bool = False,
    **spec: Any,
) -> Situation:
    replica_sets = (FORMER, replace(NEWEST, refused=refused))
    observed = make_observed(deployment=deployment, pods=pods, ready_endpoints=endpoints, replica_sets=replica_sets)
    return Situation(
        make_resource(**spec).spec,
        observed,
        obstacles,
        template_generation=template_generation,
        former=Former(was_whole=was_whole),
    )


def result(judged: Judged) -> tuple[str, str]:
    return judged.status, judged.reason
