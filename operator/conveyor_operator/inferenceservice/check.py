"""Judges the Job that tries an engine's image and configuration before a rollout removes an old engine (docs/adr/0130).

Pure; used by `desired`.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from conveyor_operator.inferenceservice.failures import may_fit_later
from conveyor_operator.inferenceservice.observed import Observed
from conveyor_operator.inferenceservice.rollout import ONE_MORE, PATIENCE, Rollout
from conveyor_operator.loop.child import id_of
from conveyor_operator.loop.owner import Object

_UNCHECKED: Final = "the new image and configuration were not tried before, because"
TOO_OLD: Final = "invalid choice: 'check'"  # the answer of an engine that does not have the command yet


@dataclass(frozen=True, slots=True)
class Check:
    """`ended`: whether the rollout may go on. `skipped`: why it goes on without a check, in words; "" otherwise."""

    ended: bool = False
    skipped: str = ""
    look_again_at: datetime | None = None

    def apply(self, rollout: Rollout, wanted: str, observed: Observed) -> Rollout:
        """Return the parameters now. wanted: hash of the new pod template."""
        if self.ended:
            return replace(rollout, because="; ".join(filter(None, (rollout.because, self.skipped))))
        has_begun = observed.deployment is not None and observed.deployment.template_hash == wanted
        return replace(ONE_MORE if has_begun else rollout, look_again_at=self.look_again_at)


def judge_check(body: Object, observed: Observed, now: datetime) -> Check:
    """Judge the Job `body`.

    A Job that gets no pod or no node must not stop a rollout: a cluster may have no room for it at all. If the new pods
    then fail, the former ones are restored.
    """
    job = observed.children.get(id_of(body))
    if job is None:
        return Check()
    if job.done:
        return Check(ended=True)
    if job.without_pods_since:
        return _wait(job.without_pods_since, f"Job {job.name} got no pod", now)
    pods = [pod for pod in observed.check_pods if pod.name.startswith(f"{job.name}-")]
    if any(TOO_OLD in container.ended_message for pod in pods for container in pod.containers):
        return Check(ended=True, skipped=f"{_UNCHECKED} the image is of an earlier release")
    waiting = [pod.unschedulable_at for pod in pods if may_fit_later(pod.unschedulable)]
    return _wait(min(waiting), f"Job {job.name} found no node", now) if waiting else Check()


def _wait(since: str, why: str, now: datetime) -> Check:
    end = datetime.fromisoformat(since) + PATIENCE
    return Check(ended=True, skipped=f"{_UNCHECKED} {why}") if end <= now else Check(look_again_at=end)
