"""`spec` as a whole: what a person asks for.

Parts: `model`, `batching`, `autoscaling`, `pod`, `scheduling`; the small ones are here. Defaults and limits live in
these models only; the CRD and the API reference are generated from them.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from conveyor_api.autoscaling import Autoscaling
from conveyor_api.base import ApiModel, Rule
from conveyor_api.batching import Batching, KVCache
from conveyor_api.model import Model
from conveyor_api.pod import Engine, ImagePullSecrets, Resources
from conveyor_api.quantities import IntOrPercent, is_zero
from conveyor_api.scheduling import Scheduling


class Endpoint(ApiModel):
    """The service's queue in the gateway."""

    max_queued_requests: Annotated[int, Field(ge=1, le=100_000)] = 512
    """Requests that may wait in one gateway; one more gets 429 with Retry-After."""
    queue_timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Longest wait for a place on an engine; then 504."""
    request_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Longest time from a request's arrival to its last byte; then 504 or the end of the stream."""


class Rollout(ApiModel):
    """How pods are replaced when the spec changes."""

    rules: ClassVar = (
        Rule(
            "!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])",
            "maxSurge and maxUnavailable must not both be 0: no pod could ever be replaced",
            lambda rollout: not (is_zero(rollout.max_surge) and is_zero(rollout.max_unavailable)),
        ),
    )

    max_surge: IntOrPercent = 0
    """Pods above the wanted number, or a percentage. 0 needs no spare GPU."""
    max_unavailable: IntOrPercent = 1
    """Pods that may be missing, or a percentage. A lone replica is missing while it is replaced."""


class Drain(ApiModel):
    """How a pod ends."""

    timeout_seconds: Annotated[int, Field(ge=0, le=3600)] = 120
    """Time for running requests to finish after the pod is told to stop; then they are cut off. Set it to the longest
    answer that must survive a scale-down or a rollout."""


class InferenceServiceSpec(ApiModel):
    """What is asked for."""

    rules: ClassVar = (
        Rule(
            "!has(self.kvCache) || !has(self.kvCache.blockBudget) || !has(self.engine) || !has(self.engine.maxModelLen)"
            " || self.kvCache.blockBudget * self.kvCache.blockSize >= self.engine.maxModelLen",
            "kvCache.blockBudget x kvCache.blockSize must be at least engine.maxModelLen: "
            "the longest request could never run; raise blockBudget or lower maxModelLen",
            lambda spec: (
                spec.kv_cache.capacity_tokens is None
                or spec.engine.max_model_len is None
                or spec.kv_cache.capacity_tokens >= spec.engine.max_model_len
            ),
            field="kvCache",
        ),
        Rule(
            "!has(self.model.secretRef) || !has(self.engine) || !has(self.engine.env)"
            " || !self.engine.env.exists(variable, variable.name == 'HF_TOKEN')",
            "HF_TOKEN comes from model.secretRef; remove it from engine.env, or remove secretRef",
            lambda spec: (
                spec.model.secret_ref is None or all(variable.name != "HF_TOKEN" for variable in spec.engine.env)
            ),
            field="engine",
        ),
        Rule(
            "!has(self.autoscaling) || self.autoscaling.provider == 'None'"
            " || !has(oldSelf.autoscaling) || oldSelf.autoscaling.provider == 'None'"
            " || self.replicas == oldSelf.replicas",
            "with autoscaling the HorizontalPodAutoscaler sets the replicas: change autoscaling.minReplicas and "
            "autoscaling.maxReplicas, or remove autoscaling to set replicas yourself",
            field="replicas",
        ),
    )

    model: Model
    """Which model is served, where it comes from, and where it is kept."""
    engine: Engine = Engine()
    """How the model is run."""
    batching: Batching = Batching()
    """How requests become batches; also what the autoscaler aims at."""
    kv_cache: KVCache = KVCache()
    """Memory for attention keys and values."""
    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Number of engines; with autoscaling only the number to start with, which cannot be changed then."""
    autoscaling: Autoscaling | None = None
    """Replicas that follow the queue; absent: `replicas` is fixed."""
    endpoint: Endpoint = Endpoint()
    """The service's queue in the gateway."""
    rollout: Rollout = Rollout()
    """How pods are replaced when the spec changes."""
    drain: Drain = Drain()
    """How a pod ends."""
    resources: Resources = Resources()
    """What one engine asks of its node."""
    scheduling: Scheduling = Scheduling()
    """Where the pods may run."""
    image_pull_secrets: ImagePullSecrets = Field(default_factory=list)
    """Secrets with the credentials of image registries."""

    @property
    def is_autoscaled(self) -> bool:
        """Whether an autoscaler, not `replicas`, says how many engines there are."""
        return self.autoscaling is not None and self.autoscaling.provider != "None"

    @property
    def in_flight_target(self) -> float | None:
        """Requests in flight per replica that the autoscaler aims at; None when replicas are fixed."""
        if self.autoscaling is None or not self.is_autoscaled:
            return None
        return max(1.0, self.batching.effective_batch_size * self.autoscaling.target_utilization / 100)

    @property
    def queue_depth_target(self) -> int | None:
        """Requests waiting beyond the window per replica that the autoscaler aims at; None when replicas are fixed."""
        if self.autoscaling is None or not self.is_autoscaled:
            return None
        return self.autoscaling.queue_depth_target or max(1, self.batching.effective_batch_size // 8)
