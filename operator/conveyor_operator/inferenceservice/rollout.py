"""How pods are replaced: by one more at a time where there is room for it, else by one less. Pure; used by `desired`.

What the spec says holds. Left open, the Deployment first makes a pod more, so that an old one goes only when a new one
answers. If that pod has no quota, or finds no node for a while, which is how a lone replica on the only GPU would wait
for ever, the rest of this rollout goes without: an old pod makes room, and requests wait in the gateway meanwhile
(docs/adr/0032).
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
    """For the Deployment; `look_again_at`: when it may have to change, though nothing happens."""

    max_surge: int | str
    max_unavailable: int | str
    look_again_at: datetime | None = None


_ONE_MORE: Final = Rollout(1, 0)
_ONE_LESS: Final = Rollout(0, 1)


def plan_rollout(spec: InferenceServiceSpec, access_mode: str | None, observed: Observed, now: datetime) -> Rollout:
    """`access_mode` is that of the claim that Conveyor makes, if it does."""
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
    """A volume may be one that only one node has at a time: on another one, a second pod would wait for ever."""
    claims = (volume.persistent_volume_claim for volume in spec.pod.volumes)
    return (
        access_mode == "ReadWriteOnce"
        or isinstance(spec.model.source, VolumeModel)
        or spec.model.cache.claim_name is not None
        or any(claim is not None for claim in claims)
    )


def _find_waiting_since(observed: Observed) -> datetime | None:
    """Since when a pod has found no node."""
    times = [pod.unschedulable_at for pod in observed.newest_pods if pod.unschedulable]
    return min((datetime.fromisoformat(time) for time in times if time), default=None)
