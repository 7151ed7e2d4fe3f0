"""Chooses how a Deployment replaces pods: with one additional pod if there is room, otherwise with one pod fewer.

Values in the spec take precedence. Without them, the Deployment first creates an additional pod, so that an old pod is
removed only after a new one is ready. If quota forbids the additional pod, or it is unschedulable for 30 s (as with one
replica on the only GPU), the rest of the rollout first removes an old pod. Requests then wait in the gateway
(docs/adr/0032). Pure; used by `desired`.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from conveyor_api.model import VolumeModel
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.inferenceservice.observed import Observed

PATIENCE: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The Deployment's rollout parameters. `look_again_at`: when the parameters may have to change without an event."""

    max_surge: int | str
    max_unavailable: int | str
    look_again_at: datetime | None = None


_ONE_MORE: Final = Rollout(1, 0)
_ONE_LESS: Final = Rollout(0, 1)


def plan_rollout(spec: InferenceServiceSpec, access_mode: str | None, observed: Observed, now: datetime) -> Rollout:
    """Return the rollout parameters. `access_mode`: of the claim that Conveyor creates; None if it creates none."""
    if not spec.rollout.is_open:
        return Rollout(*spec.rollout.given)
    if _may_mount_alone(spec, access_mode):
        return _ONE_LESS
    live = observed.deployment
    if live is None or not live.replaces_pods:
        return _ONE_MORE
    if observed.lacks_quota or live.max_surge == 0:  # until this rollout is over
        return _ONE_LESS
    waiting_since = _find_waiting_since(observed)
    if waiting_since is None:
        return _ONE_MORE
    until = waiting_since + PATIENCE
    return _ONE_LESS if now >= until else replace(_ONE_MORE, look_again_at=until)


def _may_mount_alone(spec: InferenceServiceSpec, access_mode: str | None) -> bool:
    """Return whether a volume may be mountable by only one node, so that a second pod elsewhere would never start."""
    claims = (volume.persistent_volume_claim for volume in spec.pod.volumes)
    return (
        access_mode == "ReadWriteOnce"
        or isinstance(spec.model.source, VolumeModel)
        or any(isinstance(adapter.source, VolumeModel) for adapter in spec.adapters)
        or spec.model.cache.claim_name is not None
        or any(claim is not None for claim in claims)
    )


def _find_waiting_since(observed: Observed) -> datetime | None:
    """Return the time since which a new pod has been unschedulable; None if no new pod is."""
    times = [pod.unschedulable_at for pod in observed.newest_pods if pod.unschedulable]
    return min((datetime.fromisoformat(time) for time in times if time), default=None)
