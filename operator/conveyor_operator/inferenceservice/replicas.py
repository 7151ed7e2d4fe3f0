"""The owner of the Deployment's replicas, and how ownership moves without losing a pod. Pure; used by `plan`.

Fixed (no `autoscaling`): the operator owns the field and sends a number. Autoscaled: the HPA owns
it, and the operator never sends it; but to zero and from it no HPA goes, so the operator does (docs/adr/0031).

Handing over (tried on a real 1.37.1, docs/adr/0002): leaving out a field that only we own removes it, and the
Deployment falls to its default of 1. So a second field manager, `conveyor-replicas`, applies the live number first;
then the Deployment goes without. The live object's managedFields say how far that got, so an operator that is killed in
between resumes where it stopped.

Handing back: the HPA goes first, then the number is ours again. Without `spec.replicas` the live number is held until
somebody sets it; an annotation of the Deployment remembers it.
"""

from dataclasses import dataclass

from conveyor_api import names
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice.observed import HELD_REPLICAS_ANNOTATION, DeploymentState
from conveyor_operator.loop.owner import Object

# Who may have set the number while an HPA was there: we for it, or the HPA's own controller.
_SCALERS = frozenset({names.REPLICAS_FIELD_MANAGER, "kube-controller-manager"})


@dataclass(frozen=True, slots=True)
class Replicas:
    """What the Deployment's apply carries: a number, or None; and the note that explains a held one."""

    count: int | None
    held: str = ""


@dataclass(frozen=True, slots=True)
class Handover:
    """Apply the number as `conveyor-replicas`, so that it stays when `conveyor` lets go of it."""

    count: int
    force: bool = False


def plan_replicas(spec: InferenceServiceSpec, live: DeploymentState | None, autoscaled: bool) -> Replicas:
    """The number to send with the Deployment. `autoscaled`: our HPA still exists, or did a moment ago."""
    if spec.autoscaling is not None:
        return Replicas(None)
    if live is None or spec.replicas is not None:
        return Replicas(spec.first_replicas)
    if live.held_replicas.isdigit():
        return Replicas(int(live.held_replicas), live.held_replicas)
    handed_back = names.FIELD_MANAGER not in live.replicas_managers and live.replicas_managers & _SCALERS
    if (autoscaled or handed_back) and live.asked_replicas > spec.first_replicas:
        return Replicas(live.asked_replicas, str(live.asked_replicas))
    return Replicas(spec.first_replicas)


def with_replicas(deployment: Object, replicas: Replicas) -> Object:
    """The Deployment with a number of replicas of ours; no count leaves the field to whoever owns it."""
    if replicas.count is None:
        return deployment
    metadata = dict(deployment["metadata"])
    if replicas.held:
        metadata["annotations"] = {**metadata["annotations"], HELD_REPLICAS_ANNOTATION: replicas.held}
    return {**deployment, "metadata": metadata, "spec": {"replicas": replicas.count, **deployment["spec"]}}


def plan_hold(spec: InferenceServiceSpec, live: DeploymentState | None, former: int = 0) -> Handover | None:
    """What `conveyor-replicas` has to apply now; None if nothing, or nothing yet.

    Asked before the Deployment is applied (the number is ours: keep what lives) and after it (the Deployment was
    just created: nobody owns the default, so the first number is set, or the `former` one of a Deployment that somebody
    deleted: what the autoscaler had decided).
    """
    if spec.autoscaling is None or live is None:
        return None
    if names.FIELD_MANAGER in live.replicas_managers:
        # An HPA ignores a Deployment at 0, so it starts from 1. That is not the live number, so it needs force.
        return Handover(max(1, live.asked_replicas), force=live.asked_replicas < 1)
    if not live.replicas_managers:
        return Handover(first_count(spec, former))
    return None


def plan_fixed(replicas: Replicas, live: DeploymentState | None) -> Handover | None:
    """What `conveyor-replicas` has to apply where the Deployment itself has to stay as it is."""
    if live is None or replicas.count is None or replicas.count == live.asked_replicas:
        return None
    return Handover(replicas.count, force=True)


def plan_zero(spec: InferenceServiceSpec, live: DeploymentState | None, activity: Activity) -> Handover | None:
    """What `conveyor-replicas` has to apply to send the engines away, or to have the first one back.

    They go only from a state in which all that is asked for is available: an engine that is on its way starts for
    somebody, and one that fails must be seen to. From a zero that `minReplicas` does not allow any more it starts at
    once, unless somebody else has set it.
    """
    if spec.autoscaling is None or live is None:
        return None
    if live.asked_replicas == 0:
        is_ours = names.REPLICAS_FIELD_MANAGER in live.replicas_managers
        wakes = activity is Activity.WAITING if spec.autoscaling.min_replicas == 0 else is_ours
        return Handover(spec.first_replicas, force=True) if wakes else None
    if spec.autoscaling.min_replicas == 0 and activity is Activity.IDLE and live.complete:
        return Handover(0, force=True)
    return None


def is_asleep(spec: InferenceServiceSpec, live: DeploymentState | None) -> bool:
    """Whether no engine is wanted because none was asked for, and the next request starts one."""
    return may_sleep(spec) and live is not None and live.asked_replicas == 0


def may_sleep(spec: InferenceServiceSpec) -> bool:
    return spec.autoscaling is not None and spec.autoscaling.min_replicas == 0


def first_count(spec: InferenceServiceSpec, former: int) -> int:
    """Replicas at creation: those to begin with or, under an autoscaler, the former number within its bounds."""
    return max(min(former, spec.most_replicas), spec.first_replicas)
