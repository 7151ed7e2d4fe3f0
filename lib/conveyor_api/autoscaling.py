"""`spec.autoscaling`: which autoscaler sets the replicas, with the limits and targets of Conveyor's HPA.

`behavior` has the form of autoscaling/v2. If it has no policies for scaling up, this module adds the defaults. The
operator builds the HPA.
"""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from conveyor_api.base import ApiModel, Rule
from conveyor_api.quantities import Duration, Quantity, between, parse_duration_seconds

LONGEST_PERIOD_SECONDS: Final = 1800
MAX_REPLICAS: Final = 1000
"""Kubernetes' limit for the period of a scaling policy."""


class ScalingPolicy(ApiModel):
    """One limit on how fast replicas may change."""

    type: Literal["Pods", "Percent"]
    """Whether `value` is a number of pods or a percentage of the replicas."""
    value: Annotated[int, Field(ge=1, le=10_000)]
    """Largest change within `periodSeconds`."""
    period_seconds: Annotated[int, Field(ge=1, le=LONGEST_PERIOD_SECONDS)]
    """Length of the period in seconds."""


class ScalingRules(ApiModel):
    """How replicas may change in one direction."""

    stabilization_window_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    """How many seconds of past recommendations count. Kubernetes' defaults: 0 for scaling up, 300 for scaling down."""
    select_policy: Literal["Max", "Min", "Disabled"] | None = None
    """Which policy applies if there are several. Disabled: no scaling in this direction."""
    policies: Annotated[list[ScalingPolicy], Field(min_length=1, max_length=8)] | None = None
    """Limits on how fast replicas may change."""
    tolerance: Quantity | None = None
    """Deviation from the target that is ignored, for example `0.1`."""


_SCALE_UP_SHARES: Final[tuple[tuple[Literal["Pods", "Percent"], int], ...]] = (("Pods", 4), ("Percent", 200))
"""Chosen by simulation (docs/adr/0024-a-step-up-waits-for-its-pods.md)."""


_IDLE_TIMEOUT: Final = "5m"
"""Long enough that a service with a large model, whose pods take minutes to start, is not stopped in short pauses."""


class Behavior(ApiModel):
    """`spec.behavior` of the HorizontalPodAutoscaler."""

    scale_up: ScalingRules | None = None
    """Rules for scaling up."""
    scale_down: ScalingRules | None = None
    """Rules for scaling down."""


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
            "idleTimeout scales the service to zero; set minReplicas: 0, or remove idleTimeout",
            lambda autoscaling: autoscaling.idle_timeout is None or autoscaling.min_replicas == 0,
            field="idleTimeout",
        ),
        Rule(
            "self.provider == 'Native' || self.minReplicas > 0",
            "minReplicas: 0 works only with provider: Native; set minReplicas: 1, or provider: Native",
            lambda autoscaling: autoscaling.provider == "Native" or autoscaling.min_replicas > 0,
            field="provider",
        ),
        Rule(
            "self.provider != 'External' || (!has(self.behavior) && !has(self.queueDepthPerReplica))",
            "behavior and queueDepthPerReplica have no effect with provider: External; remove them, or set "
            "provider: Native",
            lambda autoscaling: not (autoscaling.is_external and autoscaling.says_how),
            field="provider",
        ),
    )

    provider: Provider = "Native"
    """The autoscaler that sets the replicas. Native: a HorizontalPodAutoscaler that Conveyor creates. KEDA: the one
    that KEDA creates from Conveyor's ScaledObject. External: your own autoscaler of the Deployment `NAME-engine`;
    Conveyor starts with `minReplicas`."""

    min_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Lower limit of replicas. A new service starts with this number, at least one. 0: the service scales to zero after
    `idleTimeout` without requests. The next request starts an engine."""
    idle_timeout: Annotated[Duration, between("5s", "168h")] | None = None
    """Time without requests after which the service scales to zero, if `minReplicas` is 0; default: 5 minutes."""
    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
    """Upper limit of replicas."""
    target_utilization_percent: Annotated[int, Field(ge=1, le=100)] = 75
    """Target for the requests in flight per replica (queued or at an engine), in percent of its batch size. If the KV
    cache or the objectives allow fewer requests at once, the percentage is of that number."""
    queue_depth_per_replica: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Target for the requests per replica that have waited longer than the batching window; default: an eighth of the
    batch size."""
    behavior: Behavior | None = None
    """How fast replicas may change, as in autoscaling/v2. The default of `scaleUp.policies` is 4 pods or 200 percent,
    whichever is more, within `status.effective.scaleUpPeriod`."""

    @property
    def fewest_running(self) -> int:
        """Return the smallest number of replicas while the service is not idle, and the number to start with."""
        return max(1, self.min_replicas)

    @property
    def idle_timeout_seconds(self) -> float | None:
        """Return how long the service must be idle before it scales to zero, or None if it never does."""
        return parse_duration_seconds(self.idle_timeout or _IDLE_TIMEOUT) if self.min_replicas == 0 else None

    @property
    def is_external(self) -> bool:
        """Return whether the user's own autoscaler sets the number of replicas."""
        return self.provider == "External"

    @property
    def uses_keda(self) -> bool:
        return self.provider == "KEDA"

    @property
    def says_how(self) -> bool:
        """Return whether a field is set that only works with a HorizontalPodAutoscaler on Conveyor's metrics."""
        return bool(self.behavior or self.queue_depth_per_replica)

    @property
    def names_scale_up_policies(self) -> bool:
        """Return whether `behavior` has policies for scaling up."""
        return bool(self.behavior and self.behavior.scale_up and self.behavior.scale_up.policies)

    def fill_behavior(self, scale_up_period_seconds: int) -> Behavior:
        """Return `behavior`, with the default policies for scaling up if it has none."""
        given = self.behavior or Behavior()
        if self.names_scale_up_policies:
            return given
        policies = [
            ScalingPolicy(type=type, value=value, period_seconds=scale_up_period_seconds)
            for type, value in _SCALE_UP_SHARES
        ]
        scale_up = (given.scale_up or ScalingRules()).model_copy(update={"policies": policies})
        return given.model_copy(update={"scale_up": scale_up})
