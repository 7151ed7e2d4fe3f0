"""`spec` as a whole: what a person asks for.

Parts: `model`, `engine`, `batching`, `autoscaling`, `resources`, `pod`; the small ones are here. Defaults and limits
live in these models only; the CRD and the API reference are generated from them.
"""

from typing import Annotated, ClassVar, Final

from pydantic import Field

from conveyor_api import names
from conveyor_api.autoscaling import Autoscaling
from conveyor_api.base import ApiModel, Rule
from conveyor_api.batching import Batching, KVCache
from conveyor_api.engine import DEFAULT_QUEUED_REQUESTS, Engine, Runtime, Task
from conveyor_api.model import Model
from conveyor_api.pod import Pod
from conveyor_api.quantities import Duration, IntOrPercent, between, is_zero, parse_duration_seconds
from conveyor_api.queue import Queue
from conveyor_api.resources import Resources
from conveyor_api.scheduling import Name

NO_SURGE: Final = "(!has({rollout}.maxSurge) || string({rollout}.maxSurge) in ['0', '0%'])"
"""CEL: a rollout that is not told to make pods above the wanted number."""

_CREDENTIALS = (names.HUB_TOKEN_ENV, *names.BUCKET_KEYS, "AWS_SESSION_TOKEN")


class Rollout(ApiModel):
    """How pods are replaced when the spec changes. Left open, by one more at a time, which answers before an old one
    goes; by one less where that one finds no node for 30 seconds, has no quota, or might not mount a volume beside the
    others."""

    rules: ClassVar = (
        Rule(
            f"!({NO_SURGE.format(rollout='self')}"
            " && has(self.maxUnavailable) && string(self.maxUnavailable) in ['0', '0%'])",
            "maxSurge and maxUnavailable must not both be 0: no pod could ever be replaced",
            lambda rollout: not all(map(is_zero, rollout.given)),
        ),
    )

    max_surge: IntOrPercent | None = None
    """Pods above the wanted number, or a percentage; 0 where only `maxUnavailable` is given. 0 needs no spare GPU."""
    max_unavailable: IntOrPercent | None = None
    """Pods that may be missing, or a percentage; 1 where only `maxSurge` is given. A lone replica is missing while it
    is replaced."""

    @property
    def is_open(self) -> bool:
        """Nothing is said."""
        return self.max_surge is None and self.max_unavailable is None

    @property
    def given(self) -> tuple[int | str, int | str]:
        """maxSurge and maxUnavailable, where either is said."""
        surge, unavailable = self.max_surge, self.max_unavailable
        return 0 if surge is None else surge, 1 if unavailable is None else unavailable


class Drain(ApiModel):
    """How a pod ends."""

    timeout: Annotated[Duration, between("0s", "1h")] = "2m"
    """Time for running requests to finish after the pod is told to stop; then they are cut off. Set it to the longest
    answer that must survive a scale-down or a rollout."""

    @property
    def timeout_seconds(self) -> float:
        return parse_duration_seconds(self.timeout)


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
            "!has(self.model.secretRef) || !has(self.pod) || !has(self.pod.env)"
            f" || !self.pod.env.exists(variable, variable.name in {list(_CREDENTIALS)})",
            "credentials come from model.secretRef; remove them from pod.env, or remove secretRef"
            f" ({', '.join(_CREDENTIALS)})",
            lambda spec: (
                spec.model.secret_ref is None or all(variable.name not in _CREDENTIALS for variable in spec.pod.env)
            ),
            field="pod",
        ),
        Rule(
            "!has(self.replicas) || !has(self.autoscaling)",
            "with autoscaling the HorizontalPodAutoscaler sets the replicas: change autoscaling.minReplicas and "
            "autoscaling.maxReplicas, or remove autoscaling to set replicas yourself",
            lambda spec: spec.replicas is None or spec.autoscaling is None,
            field="replicas",
        ),
        Rule(
            "self.runtime != 'VLLM' || has(self.engine.image)",
            "runtime VLLM needs engine.image: the image of vLLM that was tried with this model, for example "
            "vllm/vllm-openai:v0.11.0",
            lambda spec: spec.runtime != "VLLM" or spec.engine.image is not None,
            field="engine",
        ),
        Rule(
            "self.runtime != 'VLLM' || !has(self.batching) || !has(self.batching.mode)"
            " || self.batching.mode == 'Continuous'",
            "vLLM batches in mode Continuous alone; set batching.mode: Continuous, or runtime: Conveyor",
            lambda spec: spec.runtime != "VLLM" or spec.batching.mode in (None, "Continuous"),
            field="batching",
        ),
        Rule(
            "self.runtime != 'VLLM' || !has(self.task)",
            "vLLM finds out by itself what a model does; remove task, or set runtime: Conveyor",
            lambda spec: spec.runtime != "VLLM" or spec.task is None,
            field="task",
        ),
        Rule(
            f"self.runtime != 'VLLM' || self.engine.maxQueuedRequests == {DEFAULT_QUEUED_REQUESTS}",
            "vLLM has no limit for the requests that wait inside it; remove engine.maxQueuedRequests",
            lambda spec: spec.runtime != "VLLM" or spec.engine.max_queued_requests == DEFAULT_QUEUED_REQUESTS,
            field="engine",
        ),
        Rule(
            "self.runtime == 'VLLM' || !has(self.engine.args)",
            "engine.args are arguments of vLLM; set runtime: VLLM, or remove them",
            lambda spec: spec.runtime == "VLLM" or not spec.engine.args,
            field="engine",
        ),
    )

    model: Model
    """Which model is served, where it comes from, and where it is kept."""
    task: Task | None = None
    """What the model does; default: what its files say, see `status.model.task`. Generate continues text, Embed makes
    vectors of texts, Rerank orders documents by a query, Classify labels texts. A task that the files contradict is
    refused by the engine, which says what the model does."""
    listed: bool = False
    """Whether `GET /v1/models` of the gateway's root lists this service. An unlisted one answers all the same."""
    runtime: Runtime = "Conveyor"
    """Program that runs the model. VLLM: the one in `engine.image`, with the same queue, autoscaling and rollouts."""
    engine: Engine = Engine()
    """How the model is run."""
    batching: Batching = Batching()
    """How requests become batches; also what the autoscaler aims at."""
    kv_cache: KVCache = KVCache()
    """Memory for attention keys and values."""
    queue: Queue = Queue()
    """What waits at the gateways for a place on an engine."""
    request_timeout: Annotated[Duration, between("1s", "24h")] = "10m"
    """Longest time from a request's arrival to its last byte; then 504 or the end of the stream."""
    replicas: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Number of engines; excludes `autoscaling`. Without either it is 1, or what an autoscaler has left. Set it where
    something else scales the service through `/scale`."""
    autoscaling: Autoscaling | None = None
    """Replicas that follow the queue; excludes `replicas`."""
    rollout: Rollout = Rollout()
    """How pods are replaced when the spec changes."""
    drain: Drain = Drain()
    """How a pod ends."""
    profile: Name | None = None
    """Name of a profile of the installation (the chart's `profiles`), which fills what `resources` and `pod` leave
    open; see `status.effective`."""
    resources: Resources = Resources()
    """What one engine asks of its node."""
    pod: Pod = Pod()
    """What belongs to the engine's pods as such; it goes into them as it is."""

    @property
    def request_timeout_seconds(self) -> float:
        return parse_duration_seconds(self.request_timeout)

    @property
    def first_replicas(self) -> int:
        """Engines to begin with."""
        if self.autoscaling is not None:
            return self.autoscaling.fewest_running
        return 1 if self.replicas is None else self.replicas

    @property
    def most_replicas(self) -> int:
        """Engines that there may ever be."""
        return self.first_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def in_flight_target(self) -> float | None:
        """Requests in flight per replica that the autoscaler aims at; None when replicas are fixed."""
        if self.autoscaling is None:
            return None
        return max(1.0, self.batching.effective_batch_size * self.autoscaling.target_utilization_percent / 100)

    @property
    def queue_depth_target(self) -> int | None:
        """Requests waiting beyond the window per replica that the autoscaler aims at; None when replicas are fixed."""
        if self.autoscaling is None:
            return None
        return self.autoscaling.queue_depth_per_replica or max(1, self.batching.effective_batch_size // 8)
