"""What is remembered of one InferenceService besides `loop.steps.Memory`. Kept by `case`, read by `plan`."""

from dataclasses import dataclass

from conveyor_operator.inferenceservice.observed import DeploymentState
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.loop.steps import Memory


@dataclass(slots=True)
class ServiceMemory(Memory):
    """From reconcile to reconcile."""

    generation: int = 0
    """Of the Deployment, as a call of ours saw it last; the watches may not have told of it yet."""
    template_generation: int | None = None
    """Of the Deployment, when its pod template changed last; None until it was seen for the first time."""
    pod_starts: PodStarts | None = None
    """None until the status was read for the first time."""

    # Of this reconcile alone
    former_replicas: int = 0
    """As the status told them last; 0 if it never did."""
    had_autoscaler: bool = False
    """An HPA of ours or KEDA's was there when it began, or the replicas were left to somebody else's."""

    def see_template(self, before: DeploymentState | None, now: DeploymentState | None) -> None:
        """Without a former state the template counts as changed, until its controller has observed it."""
        if now is not None and (
            self.template_generation is None or before is None or before.template_hash != now.template_hash
        ):
            self.template_generation = now.generation
