"""Chooses how a Deployment replaces pods: with one additional pod if there is room, otherwise with one pod fewer.

Values in the spec take precedence. Without them, the Deployment first creates an additional pod, so that an old pod is
removed only after a new one is ready. It removes an old pod first if only one node may mount one of its claims, if
quota forbids the additional pod, or if this pod finds no room for 30 s (as with one replica on the only GPU). Requests
then wait in the gateway (docs/adr/0032, docs/adr/0130). Pure; used by `desired`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from conveyor_api.model import VolumeModel
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.inferenceservice.failures import may_fit_later
from conveyor_operator.inferenceservice.observed import ClaimModes, DeploymentState, Observed

PATIENCE: Final = timedelta(seconds=30)

_SHARED: Final = frozenset({"ReadWriteMany", "ReadOnlyMany"})


@dataclass(frozen=True, slots=True)
class Rollout:
    """The Deployment's rollout parameters."""

    max_surge: int | str
    max_unavailable: int | str
    look_again_at: datetime | None = None
    """When the parameters may have to change without an event."""
    because: str = ""
    """Why an old pod is removed first, for messages; "" if it is not, or if the spec says so."""


ONE_MORE: Final = Rollout(1, 0)
_ONE_LESS: Final = Rollout(0, 1)


def plan_rollout(
    spec: InferenceServiceSpec,
    made: tuple[str, str] | None,
    modes: ClaimModes | None,
    observed: Observed,
    now: datetime,
) -> Rollout:
    """Return the rollout parameters.

    made: name and access mode of the claim that Conveyor creates; None if it creates none.
    modes: of the other claims; None if they were not read, because no rollout begins.
    """
    if not spec.rollout.is_open:
        return Rollout(*spec.rollout.given)
    live, has_others = observed.deployment, next(find_claims(spec), None) is not None
    if has_others and modes is None and live is not None:
        return replace(_ONE_LESS, because=_describe_lone(made)) if live.max_surge == 0 else ONE_MORE
    if lone := _describe_lone(made) or _find_lone(spec, modes or {}):
        return replace(_ONE_LESS, because=lone)
    return ONE_MORE if live is None or not live.replaces_pods else _plan_room(live, observed, now)


def find_claims(spec: InferenceServiceSpec) -> Iterator[str]:
    """Yield the names of the claims that pods mount and Conveyor has not created."""
    sources = [spec.model.source, *(adapter.source for adapter in spec.adapters)]
    yield from (source.claim_name for source in sources if isinstance(source, VolumeModel))
    if spec.model.cache.claim_name is not None:
        yield spec.model.cache.claim_name
    claims = (volume.persistent_volume_claim for volume in spec.pod.volumes)
    yield from (claim.claim_name for claim in claims if claim is not None)


def _plan_room(live: DeploymentState, observed: Observed, now: datetime) -> Rollout:
    """Return the parameters while old pods exist and claims do not matter."""
    less = replace(_ONE_LESS, because="there is no room for one more pod")
    if observed.lacks_quota or live.max_surge == 0:  # until this rollout is over
        return less
    waiting_since = _find_waiting_since(observed)
    if waiting_since is None:
        return ONE_MORE
    until = waiting_since + PATIENCE
    return less if now >= until else replace(ONE_MORE, look_again_at=until)


def _describe_lone(made: tuple[str, str] | None) -> str:
    return f"claim {made[0]} is {made[1]}" if made is not None and made[1] not in _SHARED else ""


def _find_lone(spec: InferenceServiceSpec, modes: ClaimModes) -> str:
    """Return the claim that perhaps only one node can mount, in words; "" without one.

    A second pod on another node would be scheduled, and would wait for the volume forever. A pod with a claim that does
    not exist waits too, and removing an old pod does not help it.
    """
    for name in find_claims(spec):
        if name in modes and _SHARED.isdisjoint(modes[name]):
            return f"claim {name} is {' and '.join(modes[name]) or 'not bound yet'}"
    return ""


def _find_waiting_since(observed: Observed) -> datetime | None:
    """Return the time since which a new pod has waited for room on a node; None if no new pod does."""
    times = [pod.unschedulable_at for pod in observed.newest_pods if may_fit_later(pod.unschedulable)]
    return min((datetime.fromisoformat(time) for time in times if time), default=None)
