"""The state of one call of `reconcile`, and what is remembered from call to call."""

from dataclasses import dataclass, field

from conveyor_api.resource import InferenceService
from conveyor_operator.inferenceservice.manifests import Object, Owner
from conveyor_operator.inferenceservice.observed import DeploymentState, Observed
from conveyor_operator.inferenceservice.plan import Applied, ChildId, Obstacle
from conveyor_operator.kinds import DEPLOYMENT
from conveyor_operator.loop.report import Reported


@dataclass(slots=True)
class Memory:
    """What is remembered of one InferenceService, as long as it has this uid."""

    uid: str
    applied: dict[ChildId, Applied] = field(default_factory=dict)
    reported: Reported = field(default_factory=Reported)
    failing: bool = False
    """The call before ended with an ApiError."""
    generation: int = 0
    """Of the Deployment, as a call of ours saw it last; the watches may not have told of it yet."""
    template_generation: int | None = None
    """Of the Deployment, when its pod template changed last; None until it was seen for the first time."""

    def see_template(self, before: DeploymentState | None, now: DeploymentState | None) -> None:
        """A first look cannot tell whether the template has changed just now: it has, until its controller saw it."""
        if now is not None and (
            self.template_generation is None or before is None or before.template_hash != now.template_hash
        ):
            self.template_generation = now.generation


@dataclass(slots=True)
class Work:
    """One call's state: what is wanted, what is there by now, and what stands in the way."""

    service: InferenceService
    owner: Owner
    observed: Observed
    image: str
    memory: Memory
    former_replicas: int
    """As the status told them last; 0 if it never did."""
    obstacles: list[Obstacle] = field(default_factory=list)
    restored: dict[ChildId, bool] = field(default_factory=dict)
    """Children that somebody had changed by hand; True: deleted."""

    @property
    def is_behind(self) -> bool:
        """Whether the Deployment was seen newer than it was told: its replicas would be planned by an old number."""
        return self.observed.deployment is not None and self.observed.deployment.generation < self.memory.generation

    def see(self, child: Object) -> None:
        """A call of ours has brought this child."""
        before, self.observed = self.observed.deployment, self.observed.with_child(child)
        if child["kind"] == DEPLOYMENT.kind:
            self.memory.generation = int(child["metadata"]["generation"])
            self.memory.see_template(before, self.observed.deployment)
