"""Finds how the observed children of one InferenceService differ from the desired ones. Pure.

`plan` calls it once for each plan, and `case` once for each status.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from conveyor_api import names
from conveyor_operator.inferenceservice.desired import Desired
from conveyor_operator.inferenceservice.memory import ServiceMemory
from conveyor_operator.inferenceservice.observed import Observed, RolledBack
from conveyor_operator.inferenceservice.rollback import find_rolled_back
from conveyor_operator.inferenceservice.rollout import PATIENCE
from conveyor_operator.inferenceservice.wording import explain_refusal
from conveyor_operator.kinds import AUTOSCALER, DEPLOYMENT, JOB, SCALED_OBJECT
from conveyor_operator.loop.child import Child, id_of
from conveyor_operator.loop.differences import find_obstacle, find_obstacles
from conveyor_operator.loop.owner import Object
from conveyor_operator.loop.steps import Obstacle

AUTOSCALERS = (AUTOSCALER.kind, SCALED_OBJECT.kind)


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences between `desired` and `observed`."""

    desired: Desired
    observed: Observed
    wanted: tuple[Object, ...]
    """The desired children, without the autoscaler while an object that is not ours has the Deployment's name."""
    obstacles: tuple[Obstacle, ...]
    """Children whose names are taken, and children for which a call has failed in this reconcile."""
    prewarming: bool
    """Whether a Job must download the model before pods of this spec are created. Existing pods are not changed."""
    rolled_back: RolledBack | None
    """Why the Deployment has an earlier pod template, which stays; None if it has not, or must get the desired one."""
    checking: bool
    """Whether a Job must try the image and configuration of the new pods before an old pod is removed for them."""
    podless_job: Child | None
    """The Job that must download the model, if it has not had a pod yet; None if `prewarming` is False."""

    @property
    def keeps_pods(self) -> bool:
        """Whether the Deployment must not get the desired pod template yet. Only its replicas may change."""
        return self.prewarming or self.checking or self.rolled_back is not None

    @property
    def end_of_patience(self) -> datetime | None:
        """The time by which the Job should have had a pod; None without such a Job."""
        if self.podless_job is None:
            return None
        return datetime.fromisoformat(self.podless_job.without_pods_since) + PATIENCE

    def name_podless_job(self, now: datetime) -> str:
        """Return the name of a Job that has had no pod for too long, or an empty string."""
        end = self.end_of_patience
        return self.podless_job.name if self.podless_job is not None and end is not None and end <= now else ""


def find_differences(desired: Desired, observed: Observed, memory: ServiceMemory) -> Differences:
    wanted = tuple(_without_aimless_autoscaler(desired, observed))
    taken = find_obstacles(desired.owner, wanted, observed.children)
    spec = desired.spec
    refused = [replace(each, message=explain_refusal(each.message, spec)) for each in memory.refused.values()]
    prewarms = [child for child in desired.children if child["kind"] == JOB.kind and child is not desired.check_job]
    jobs = [observed.children.get(id_of(child)) for child in prewarms]
    live = observed.deployment
    has_pods = live is not None and live.template_hash == desired.template_hash
    prewarming = not has_pods and not all(job is not None and job.done for job in jobs)
    podless = next((job for job in jobs if job is not None and job.without_pods_since), None)
    return Differences(
        desired,
        observed,
        wanted,
        (*taken, *refused),
        prewarming,
        rolled_back=find_rolled_back(live, desired.template_hash, desired.attempt),
        checking=desired.check_job is not None and not has_pods,
        podless_job=podless if prewarming else None,
    )


def find_kedas_autoscaler(desired: Desired, observed: Observed) -> Child | None:
    """Return the HPA with the engine's name if KEDA created it, even for another owner's ScaledObject; or None."""
    name = names.engine_name(desired.owner.name)
    child = observed.children.get((AUTOSCALER.kind, name))
    return child if child is not None and child.controller == f"{SCALED_OBJECT.kind}/{name}" else None


def _without_aimless_autoscaler(desired: Desired, observed: Observed) -> Iterator[Object]:
    deployment = observed.children.get((DEPLOYMENT.kind, names.engine_name(desired.owner.name)))
    aimless = deployment is not None and find_obstacle(desired.owner, deployment) is not None
    return (child for child in desired.children if not (aimless and child["kind"] in AUTOSCALERS))
