"""Decides who owns the Deployment's replicas, and hands over ownership without stopping a pod. Pure.

Fixed (no `autoscaling`): the operator owns the field and sends a number. Autoscaled: the HPA owns the field, and the
operator does not send it. An HPA cannot scale to zero or from zero, so the operator does that itself (docs/adr/0031).

Handing over to the HPA (tested on Kubernetes 1.37.1, docs/adr/0002): if a field's only owner leaves it out, the API
server removes the field, and the Deployment falls to its default of 1. So a second field manager, `conveyor-replicas`,
first applies the live number. Then the operator applies the Deployment without the field. The live object's
managedFields show how far this got, so an operator that is killed in between resumes where it stopped.

Handing back: first the HPA is deleted, then the operator owns the number again. Without `spec.replicas`, a live number
above the initial one stays until somebody sets `spec.replicas`. An annotation of the Deployment stores that number.
"""

from dataclasses import dataclass

from conveyor_api import names
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice.observed import HELD_REPLICAS_ANNOTATION, DeploymentState
from conveyor_operator.loop.owner import Object

# Field managers that may have set the number while an HPA existed: the operator for the HPA, or the HPA's controller.
_SCALERS = frozenset({names.REPLICAS_FIELD_MANAGER, "kube-controller-manager"})


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas in the Deployment's apply: a number or None, and the annotation for a number that is kept."""

    count: int | None
    held: str = ""


@dataclass(frozen=True, slots=True)
class Handover:
    """Apply the number as `conveyor-replicas`, so that it stays when `conveyor` gives up the field."""

    count: int
    force: bool = False


def plan_replicas(spec: InferenceServiceSpec, live: DeploymentState | None, autoscaled: bool) -> Replicas:
    """Return the number to send with the Deployment. `autoscaled`: see `had_autoscaler` in `memory`."""
    if spec.autoscaling is not None:
        return Replicas(None)
    if live is None or spec.replicas is not None:
        return Replicas(spec.first_replicas)
    if live.held_replicas.isdigit():
        return Replicas(int(live.held_replicas), live.held_replicas)
    handed_back = names.FIELD_MANAGER not in live.replicas_managers and live.replicas_managers & _SCALERS
    if (autoscaled or handed_back) and live.requested_replicas > spec.first_replicas:
        return Replicas(live.requested_replicas, str(live.requested_replicas))
    return Replicas(spec.first_replicas)


def with_replicas(deployment: Object, replicas: Replicas) -> Object:
    """Return the Deployment with this number of replicas. Without a count, the field stays with its owner."""
    if replicas.count is None:
        return deployment
    metadata = dict(deployment["metadata"])
    if replicas.held:
        metadata["annotations"] = {**metadata["annotations"], HELD_REPLICAS_ANNOTATION: replicas.held}
    return {**deployment, "metadata": metadata, "spec": {"replicas": replicas.count, **deployment["spec"]}}


def plan_hold(spec: InferenceServiceSpec, live: DeploymentState | None, former: int = 0) -> Handover | None:
    """Return the number that `conveyor-replicas` must apply now; None if it must apply nothing now.

    Called before the Deployment is applied: if the operator owns the number, the live number is kept. Also called after
    the apply: nobody owns the default of a new Deployment, so the first number is set. If somebody had deleted the
    Deployment, this restores the number that the autoscaler had chosen, `former`.
    """
    if spec.autoscaling is None or live is None:
        return None
    if names.FIELD_MANAGER in live.replicas_managers:
        # An HPA ignores a Deployment with 0 replicas, so 0 becomes 1. This needs force, because `conveyor` owns the 0.
        return Handover(max(1, live.requested_replicas), force=live.requested_replicas < 1)
    if not live.replicas_managers:
        return Handover(first_count(spec, former))
    return None


def plan_fixed(replicas: Replicas, live: DeploymentState | None) -> Handover | None:
    """Return the number that `conveyor-replicas` must apply while the Deployment itself must not change; or None."""
    if live is None or replicas.count is None or replicas.count == live.requested_replicas:
        return None
    return Handover(replicas.count, force=True)


def plan_zero(spec: InferenceServiceSpec, live: DeploymentState | None, activity: Activity) -> Handover | None:
    """Return the number that `conveyor-replicas` must apply to scale to zero, or to start the first engine; or None.

    Scales to zero only if all desired engines are available: an engine that is starting is meant for a request, and a
    failing engine must stay visible. If `minReplicas` no longer allows zero, the first engine starts at once, unless
    somebody else has set the zero.
    """
    if spec.autoscaling is None or live is None:
        return None
    if live.requested_replicas == 0:
        is_ours = names.REPLICAS_FIELD_MANAGER in live.replicas_managers
        wakes = activity is Activity.WAITING if spec.autoscaling.min_replicas == 0 else is_ours
        return Handover(spec.first_replicas, force=True) if wakes else None
    if spec.autoscaling.min_replicas == 0 and activity is Activity.IDLE and live.complete:
        return Handover(0, force=True)
    return None


def is_asleep(spec: InferenceServiceSpec, live: DeploymentState | None) -> bool:
    """Return whether the service is scaled to zero, so that the next request starts an engine."""
    return may_sleep(spec) and live is not None and live.requested_replicas == 0


def may_sleep(spec: InferenceServiceSpec) -> bool:
    return spec.autoscaling is not None and spec.autoscaling.min_replicas == 0


def first_count(spec: InferenceServiceSpec, former: int) -> int:
    """Return the replicas at creation: the initial number, or the former number within limits if that is larger."""
    return max(min(former, spec.most_replicas), spec.first_replicas)
