"""`spec` as a whole: the state that a user wants.

Each larger field is defined in a module of its own (`model`, `engine`, `pod` and others). This module defines `rollout`
and `drain`. Defaults and limits are only in these classes. The CRD and the API reference are generated from the
classes.
"""

from typing import Annotated, ClassVar, Final

from pydantic import Field

from conveyor_api import names
from conveyor_api.access import Access
from conveyor_api.adapters import ADAPTER_RULES, Adapters
from conveyor_api.autoscaling import MAX_REPLICAS, Autoscaling
from conveyor_api.base import ApiModel, Rule
from conveyor_api.batching import DEFAULT_BATCH_SIZE, DEFAULT_BATCH_SIZE_CUDA, Batching, KVCache
from conveyor_api.compatibility import RUNTIME_RULES, TASK_RULES
from conveyor_api.engine import Engine, Runtime, Task
from conveyor_api.model import Model
from conveyor_api.pod import Metadata, Pod
from conveyor_api.quantities import Duration, IntOrPercent, between, is_zero, parse_duration_seconds
from conveyor_api.queue import Queue
from conveyor_api.resources import Resources
from conveyor_api.scheduling import Name
from conveyor_api.speculation import DRAFT_RULE, Speculation
from conveyor_api.workload import P95_SUM_CEL, Workload

NO_SURGE: Final = "(!has({rollout}.maxSurge) || string({rollout}.maxSurge) in ['0', '0%'])"
"""CEL expression that is true if the rollout allows no pods above the desired number."""

_P95_SUM = P95_SUM_CEL.format(at="")
_CREDENTIALS = (names.HUB_TOKEN_ENV, *names.BUCKET_KEYS, "AWS_SESSION_TOKEN")


class Rollout(ApiModel):
    """How pods are replaced when the spec changes. By default one more pod starts, and an old pod stops once the new
    one is ready. An old pod stops first if the additional pod finds no node for 30 seconds or has no quota, or if only
    one node at a time might be able to mount a claim (ReadWriteOnce)."""

    rules: ClassVar = (
        Rule(
            f"!({NO_SURGE.format(rollout='self')}"
            " && has(self.maxUnavailable) && string(self.maxUnavailable) in ['0', '0%'])",
            "maxSurge and maxUnavailable must not both be 0: no pod could ever be replaced",
            lambda rollout: not all(map(is_zero, rollout.given)),
        ),
    )

    max_surge: IntOrPercent | None = None
    """Pods above the desired number, as a number or a percentage; default 0 if only `maxUnavailable` is set. With 0 a
    rollout needs no spare GPU."""
    max_unavailable: IntOrPercent | None = None
    """Pods that may be unavailable, as a number or a percentage; default 1 if only `maxSurge` is set. A single replica
    is unavailable while it is replaced."""

    @property
    def is_open(self) -> bool:
        """Return whether no field is set."""
        return self.max_surge is None and self.max_unavailable is None

    @property
    def given(self) -> tuple[int | str, int | str]:
        """Return maxSurge (0 if not set) and maxUnavailable (1 if not set). Meaningful only if one is set."""
        surge, unavailable = self.max_surge, self.max_unavailable
        return 0 if surge is None else surge, 1 if unavailable is None else unavailable


class Drain(ApiModel):
    """How a pod shuts down."""

    timeout: Annotated[Duration, between("0s", "1h")] = "2m"
    """Time for running requests to finish after the pod begins to terminate. Requests that run longer are cut off. Set
    it to the longest response that must survive."""

    @property
    def timeout_seconds(self) -> float:
        return parse_duration_seconds(self.timeout)


class InferenceServiceSpec(ApiModel):
    """The desired state."""

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
            "!has(self.workload) || !has(self.engine) || !has(self.engine.maxModelLen)"
            f" || {_P95_SUM} <= self.engine.maxModelLen",
            "inputTokens.p95 + outputTokens.p95 must be at most engine.maxModelLen; raise maxModelLen, or lower them",
            lambda spec: (
                spec.workload is None
                or spec.engine.max_model_len is None
                or spec.workload.long_tokens <= spec.engine.max_model_len
            ),
            field="workload",
        ),
        Rule(
            "!has(self.workload) || !has(self.kvCache) || !has(self.kvCache.blockBudget)"
            f" || {_P95_SUM} <= self.kvCache.blockBudget * self.kvCache.blockSize",
            "inputTokens.p95 + outputTokens.p95 must be at most kvCache.blockBudget x kvCache.blockSize; "
            "raise blockBudget, or lower them",
            lambda spec: (
                spec.workload is None
                or spec.kv_cache.capacity_tokens is None
                or spec.workload.long_tokens <= spec.kv_cache.capacity_tokens
            ),
            field="workload",
        ),
        *TASK_RULES,
        *RUNTIME_RULES,
        *ADAPTER_RULES,
        DRAFT_RULE,
    )

    model: Model
    """The model to serve, its source, and its cache."""
    adapters: Adapters = Field(default_factory=list)
    """LoRA adapters that every engine serves beside the model. Running engines load and unload them."""
    task: Task | None = None
    """Task of the model; default: detected from its files (`status.model.task`). Generate continues text, Embed makes
    vectors, Rerank orders documents by a query, Classify and ImageClassify name labels, Transcribe turns speech into
    text, ImageGenerate makes images from prompts, Custom computes tensors with your own program or class."""
    listed: bool = False
    """Whether `GET /v1/models` at the gateway's root lists this service. Others answer requests too."""
    access: Access = Access()
    """Who may use the service."""
    runtime: Runtime = "Conveyor"
    """Program that runs the model. VLLM: the one in `engine.image`, with the same queue, autoscaling and rollouts."""
    engine: Engine = Engine()
    """Settings of the engine."""
    batching: Batching = Batching()
    """How requests are grouped into batches. The autoscaler derives its targets from the batch size."""
    kv_cache: KVCache = KVCache()
    """Memory for attention keys and values."""
    workload: Workload | None = None
    """Lengths of the requests, from which engines derive their sizes; default: sizes that fit every request. `kubectl
    conveyor advise` shows them."""
    speculation: Speculation | None = None
    """Drafts of the next tokens of answers; default: none."""
    queue: Queue = Queue()
    """Limits of the queue in the gateways."""
    request_timeout: Annotated[Duration, between("1s", "24h")] = "10m"
    """Longest time from a request's arrival to its last byte. Then the client gets 504, or its stream ends."""
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | None = None
    """Number of engines; cannot be set together with `autoscaling`. Default: 1, or the last number of an autoscaler
    that was removed. Set it if something else scales through `/scale`."""
    autoscaling: Autoscaling | None = None
    """Autoscaling by the length of the queue; cannot be set together with `replicas`."""
    rollout: Rollout = Rollout()
    """How pods are replaced when the spec changes."""
    drain: Drain = Drain()
    """How a pod shuts down."""
    profile: Name | None = None
    """Name of a profile (the chart's value `profiles`). It fills the fields of `metadata`, `resources` and `pod` that
    are not set, and then the profile `default` does; see `status.effective`."""
    metadata: Metadata = Metadata()
    """Labels and annotations for all objects that Conveyor creates for the service, except its pods (`pod.labels`). A
    change replaces no pod."""
    resources: Resources = Resources()
    """Resources of the engine's container."""
    pod: Pod = Pod()
    """Settings of the engine's pods, copied into the pod template unchanged."""

    @property
    def request_timeout_seconds(self) -> float:
        return parse_duration_seconds(self.request_timeout)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs, or slices of GPUs, that each engine requests."""
        limits = self.resources.limits
        return sum(int(amount) for name, amount in limits.items() if name.startswith(names.GPU_VENDOR))

    @property
    def tensor_parallel_size(self) -> int:
        """Return how many GPUs compute one model together: only whole GPUs, and only for models that generate text."""
        if self.engine.tensor_parallel_size is not None:
            return self.engine.tensor_parallel_size
        if self.runtime == "VLLM" or self.task not in (None, "Generate"):
            return 1
        return max(1, int(self.resources.limits.get(names.GPU, 1)))

    @property
    def draft_model(self) -> Model | None:
        """Return the draft model, with the Secret and the cache of the model; None if there is none."""
        draft = None if self.speculation is None else self.speculation.draft
        return None if draft is None else self.model.model_copy(update={"uri": draft.uri})

    def settle_batching(self, task: str | None) -> Batching:
        """Return `batching` with the defaults for this task. task: None if it is not known yet."""
        if self.runtime != "Conveyor":
            return self.batching.settle(None)
        on_cuda = self.engine.device == "CUDA" and task in (None, "Generate")
        return self.batching.settle(task, DEFAULT_BATCH_SIZE_CUDA if on_cuda else DEFAULT_BATCH_SIZE)

    @property
    def first_replicas(self) -> int:
        """Return the number of engines of a new service."""
        if self.autoscaling is not None:
            return self.autoscaling.fewest_running
        return 1 if self.replicas is None else self.replicas

    @property
    def most_replicas(self) -> int:
        """Return the largest possible number of engines."""
        return self.first_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def in_flight_target(self) -> float | None:
        """Return the autoscaler's target for requests in flight per replica; None if the replicas are fixed."""
        if self.autoscaling is None:
            return None
        return max(1.0, self.batching.effective_batch_size * self.autoscaling.target_utilization_percent / 100)

    @property
    def queue_depth_target(self) -> int | None:
        """Return the autoscaler's target, per replica, for requests that have waited longer than the window; None if
        replicas are fixed."""
        if self.autoscaling is None:
            return None
        return self.autoscaling.queue_depth_per_replica or max(1, self.batching.effective_batch_size // 8)
