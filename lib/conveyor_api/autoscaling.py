"""`spec.autoscaling`: who chooses the replicas; for Conveyor's HorizontalPodAutoscaler, between how many and by what.

`behavior` has the shape of autoscaling/v2; what it leaves open of scaling up is filled here. The operator builds the
HPA.
"""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from conveyor_api.base import ApiModel, Rule
from conveyor_api.quantities import Duration, Quantity, between, parse_duration_seconds

LONGEST_PERIOD_SECONDS: Final = 1800
"""Of a policy, as Kubernetes has it."""


class ScalingPolicy(ApiModel):
    """One limit on how fast replicas may change."""

    type: Literal["Pods", "Percent"]
    """Whether `value` counts pods or per cent of the replicas."""
    value: Annotated[int, Field(ge=1, le=10_000)]
    """Largest change within `periodSeconds`."""
    period_seconds: Annotated[int, Field(ge=1, le=LONGEST_PERIOD_SECONDS)]
    """Length of the period in seconds."""


class ScalingRules(ApiModel):
    """How replicas may change in one direction."""

    stabilization_window_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    """Seconds of past recommendations that are looked at; Kubernetes' default is 0 up and 300 down."""
    select_policy: Literal["Max", "Min", "Disabled"] | None = None
    """Which policy wins; Disabled forbids the direction."""
    policies: Annotated[list[ScalingPolicy], Field(min_length=1, max_length=8)] | None = None
    """Limits on the speed of change."""
    tolerance: Quantity | None = None
    """Deviation from the target that is ignored, for example `0.1`."""


_SCALE_UP_SHARES: Final[tuple[tuple[Literal["Pods", "Percent"], int], ...]] = (("Pods", 4), ("Percent", 200))
"""Chosen by simulation (docs/adr/0024-a-step-up-waits-for-its-pods.md)."""


_IDLE_TIMEOUT: Final = "5m"
"""A pod of a large model takes minutes to start."""


class Behavior(ApiModel):
    """`spec.behavior` of the HorizontalPodAutoscaler."""

    scale_up: ScalingRules | None = None
    """Rules for more replicas."""
    scale_down: ScalingRules | None = None
    """Rules for fewer replicas."""


Provider = Literal["Native", "KEDA", "External"]


class Autoscaling(ApiModel):
    """Replicas that follow the queue, by a HorizontalPodAutoscaler. Without this object their number is fixed."""

    rules: ClassVar = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas must not be more than maxReplicas",
            lambda autoscaling: autoscaling.min_replicas <= autoscaling.max_replicas,
            field="minReplicas",
        ),
        Rule(
            "!has(self.idleTimeout) || self.minReplicas == 0",
            "idleTimeout is the time after which no engine is left; set minReplicas: 0, or remove idleTimeout",
            lambda autoscaling: autoscaling.idle_timeout is None or autoscaling.min_replicas == 0,
            field="idleTimeout",
        ),
        Rule(
            "self.provider == 'Native' || self.minReplicas > 0",
            "minReplicas: 0 is for Conveyor's own autoscaler; set minReplicas: 1, or provider: Native",
            lambda autoscaling: autoscaling.provider == "Native" or autoscaling.min_replicas > 0,
            field="provider",
        ),
        Rule(
            "self.provider != 'External' || (!has(self.behavior) && !has(self.queueDepthPerReplica))",
            "behavior and queueDepthPerReplica are not for an autoscaler of yours; remove them, or let Conveyor scale "
            "with provider: Native",
            lambda autoscaling: not (autoscaling.is_external and autoscaling.says_how),
            field="provider",
        ),
    )

    provider: Provider = "Native"
    """Who sets the replicas. Native: a HorizontalPodAutoscaler that Conveyor makes. KEDA: the one that KEDA makes of
    a ScaledObject of Conveyor's. External: an autoscaler of yours that scales the Deployment `NAME-engine`; Conveyor
    begins with `minReplicas`, and leaves the number alone."""

    min_replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Fewest replicas; the service begins with them, or with one. 0: without requests for `idleTimeout` no engine is
    left, and the next request, which waits in the gateway, starts one."""
    idle_timeout: Annotated[Duration, between("5s", "168h")] | None = None
    """Time without a request after which no engine is left, where `minReplicas` is 0; default: 5 minutes."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)]
    """Most replicas."""
    target_utilization_percent: Annotated[int, Field(ge=1, le=100)] = 75
    """Requests in flight that a replica should have, in per cent of its batch size, or of what its KV cache carried at
    once lately if that is less."""
    queue_depth_per_replica: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Requests for each replica that may wait beyond the batching window; default: an eighth of the batch size."""
    behavior: Behavior | None = None
    """How fast replicas may change, as in autoscaling/v2. Without `scaleUp.policies`, by 4 more or to three times as
    many within `status.effective.scaleUpPeriod`."""

    @property
    def fewest_running(self) -> int:
        """Replicas while requests come, and to begin with."""
        return max(1, self.min_replicas)

    @property
    def idle_timeout_seconds(self) -> float | None:
        """None: some engine always runs."""
        return parse_duration_seconds(self.idle_timeout or _IDLE_TIMEOUT) if self.min_replicas == 0 else None

    @property
    def is_external(self) -> bool:
        """Whether the number is left to somebody of whom nothing is known."""
        return self.provider == "External"

    @property
    def uses_keda(self) -> bool:
        return self.provider == "KEDA"

    @property
    def says_how(self) -> bool:
        """Whether it has what only a HorizontalPodAutoscaler on Conveyor's metrics acts by."""
        return bool(self.behavior or self.queue_depth_per_replica)

    @property
    def names_scale_up_policies(self) -> bool:
        """Whether `behavior` says how fast to scale up."""
        return bool(self.behavior and self.behavior.scale_up and self.behavior.scale_up.policies)

    def fill_behavior(self, scale_up_period_seconds: int) -> Behavior:
        """`behavior`, with the policies of scaling up if it leaves them open."""
        given = self.behavior or Behavior()
        if self.names_scale_up_policies:
            return given
        policies = [
            ScalingPolicy(type=type, value=value, period_seconds=scale_up_period_seconds)
            for type, value in _SCALE_UP_SHARES
        ]
        scale_up = (given.scale_up or ScalingRules()).model_copy(update={"policies": policies})
        return given.model_copy(update={"scale_up": scale_up})
