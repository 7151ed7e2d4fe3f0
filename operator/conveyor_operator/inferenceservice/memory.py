"""What the operator remembers of one InferenceService, in addition to `loop.steps.Memory`."""

from dataclasses import dataclass

from conveyor_operator.inferenceservice.observed import ClaimModes, DeploymentState
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.loop.steps import Memory


@dataclass(slots=True)
class ServiceMemory(Memory):
    """What the operator remembers of a service between reconciles."""

    generation: int = 0
    """The Deployment's generation in the response to our last call. The watches may lag behind it."""
    template_generation: int | None = None
    """The Deployment's generation at the last change of its pod template; None until it was first seen."""
    claim_modes: ClaimModes | None = None
    """Access modes of the claims that Conveyor has not created; None until they were read."""
    claims_read_for: str = ""
    """Hash of the pod template for which they were read."""
    pod_starts: PodStarts | None = None
    """None until the status is first read."""

    # Only for the current reconcile
    former_replicas: int = 0
    """`desiredReplicas` in the last status; 0 if it had none."""
    had_autoscaler: bool = False
    """Whether an HPA or a ScaledObject existed when the reconcile began, or the provider was External before."""

    def see_template(self, before: DeploymentState | None, now: DeploymentState | None) -> None:
        """Record the generation at which the pod template changed. Without `before`, record the present generation.

        Do the same if the present generation is lower, because etcd was restored.
        """
        if now is not None and (
            self.template_generation is None
            or before is None
            or before.template_hash != now.template_hash
            or now.generation < self.template_generation
        ):
            self.template_generation = now.generation
