"""`status`: the state that the operator has observed. Only the operator writes it, through the `/status` subresource.

Unknown fields are ignored, because the status of a newer operator may remain after a downgrade. Texts have limits here;
`text.clip` shortens longer ones before they are sent.
"""

import math
from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field

from conveyor_api.base import ApiModel, KeyedBy
from conveyor_api.conditions import SEE_READY, ConditionType
from conveyor_api.quantities import Duration, IntOrPercent
from conveyor_api.queue import MAX_CLASSES
from conveyor_api.text import MAX_MESSAGE_BYTES

MAX_CONTEXT_LENGTH: Final = 16_777_216
MAX_WEIGHT_BYTES: Final = 1 << 50
NUM_POD_STARTS: Final = 3

Message = Annotated[str, Field(max_length=MAX_MESSAGE_BYTES)]
Word = Annotated[str, Field(max_length=253)]
Count = Annotated[int, Field(ge=0)]
Amounts = Annotated[dict[str, Annotated[str, Field(max_length=32)]], Field(max_length=12)]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]


class _StatusModel(ApiModel):
    model_config = ConfigDict(extra="ignore")


class Condition(_StatusModel):
    """One aspect of the state, as in metav1.Condition."""

    type: Word
    """Type of the condition: see Conditions."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=253)]
    """Reason of the status, as one CamelCase word: see Reasons."""
    message: Message = ""
    """Explanation of the status, as a sentence."""
    observed_generation: Count | None = None
    """`metadata.generation` of the spec that the condition is about."""
    last_transition_time: Time
    """When `status` last changed."""


class ModelStatus(_StatusModel):
    """The served model."""

    name: Annotated[str, Field(max_length=128)] | None = None
    """Name that clients put in `model`."""
    uri: Annotated[str, Field(max_length=512)] | None = None
    """Source of the model that `contextLength` and `task` describe."""
    context_length: Annotated[int, Field(ge=2, le=MAX_CONTEXT_LENGTH)] | None = None
    """Longest context of the model in tokens, from its files. The API server rejects an edit that sets a longer one,
    so the pods keep running."""
    task: Annotated[str, Field(max_length=63)] | None = None
    """Task of the model: `spec.task`, or the one detected from its files."""
    quantization: Annotated[str, Field(max_length=63)] | None = None
    """Format of quantized weights, as the model's files name it. Conveyor's engine computes with
    16 bits, except with some formats."""
    weight_bytes: Annotated[int, Field(ge=1, le=MAX_WEIGHT_BYTES)] | None = None
    """Bytes of the weights in the model's files."""


class MetricStatus(_StatusModel):
    """One metric that the autoscaler uses."""

    name: Word
    """Name of the metric."""
    current: Annotated[str, Field(max_length=32)] | None = None
    """Value per replica at the time of the decision, as a quantity. `kubectl get hpa` has the present value."""
    target: Annotated[str, Field(max_length=32)] | None = None
    """Target value per replica, as a quantity."""


class AutoscalingStatus(_StatusModel):
    """The autoscaler's last decision, with the metric values behind it. It changes only with the decision."""

    desired_replicas: Count | None = None
    """Replicas that the autoscaler wants."""
    reason: Word | None = None
    """Reason for the number, in one word: Decided; AtMaximum (the metrics ask for more); Stabilized or Limited (by
    `behavior`); Pending (not applied yet); NoMetrics; ScaledToZero; Woken (from zero, by a request)."""
    metrics: Annotated[list[MetricStatus], Field(max_length=8), KeyedBy("name")] = Field(default_factory=list)
    """The metric values behind the decision."""
    message: Message | None = None
    """The decision with its arithmetic."""


class ResourcesStatus(_StatusModel):
    """Resources of the engine's container."""

    requests: Amounts = Field(default_factory=dict)
    """Amounts that are reserved."""
    limits: Amounts = Field(default_factory=dict)
    """Amounts that are never exceeded."""


class QueueClassStatus(_StatusModel):
    """One class of the queue."""

    name: Word
    """Name of the class."""
    level: Count
    """Lower levels go first."""
    max_requests: Count | None = None
    """Limit of waiting requests of this class."""
    timeout: Word | None = None
    """Longest wait for an engine."""
    overtaken_for: Word | None = None
    """A waiting request of this class is overtaken only by requests that arrive within this time after it."""


class DerivedStatus(_StatusModel):
    """One size that follows from `spec.workload`."""

    name: Word
    """The field that can set this size, or a description if there is no field."""
    value: Annotated[str, Field(max_length=64)]
    """The size."""
    reason: Message
    """Explanation of the size, as a sentence."""


class EffectiveStatus(_StatusModel):
    """Values in use, in particular of fields that the spec does not set."""

    image: Annotated[str, Field(max_length=512)] | None = None
    """Image that the pods run. A service keeps it until its pods change for another reason, so that an upgrade of
    Conveyor restarts no engine."""
    mode: Word | None = None
    """The batching mode: `batching.mode`, or the default for the model's task."""
    max_batch_size: Count | None = None
    """Requests that run together on one engine. The autoscaler's targets follow from it."""
    window: Word | None = None
    """How long a batch waits for more requests after its first one, in modes that have a window."""
    max_surge: IntOrPercent | None = None
    """Pods above the desired number during a rollout: from `rollout`, or the present default."""
    max_unavailable: IntOrPercent | None = None
    """Pods that may be unavailable during a rollout: from `rollout`, or the present default."""
    pod_starts: Annotated[list[Duration], Field(max_length=NUM_POD_STARTS)] | None = None
    """How long the latest pods took from their creation until they were ready, the newest last."""
    scale_up_period: Duration | None = None
    """Period of the default policies for scaling up: the slowest of `podStarts` plus two queue time-outs. A time-out
    counts as at most a minute. Before the first pod of the service has started, 5 minutes count as its start."""
    resources: ResourcesStatus | None = None
    """Resources of the engine's container, with the requests that Conveyor adds."""
    queue_classes: Annotated[list[QueueClassStatus], Field(max_length=MAX_CLASSES), KeyedBy("name")] | None = None
    """Classes of the queue with their limits, the lowest level first."""
    from_profile: Annotated[list[Word], Field(max_length=64)] | None = None
    """Fields of the spec that the profiles set."""
    tensor_parallel_size: Count | None = None
    """GPUs that compute the model of one engine together, if there are several."""
    derived: Annotated[list[DerivedStatus], Field(max_length=8), KeyedBy("name")] | None = None
    """Sizes that follow from `spec.workload`, except sizes that a field sets."""
    cache_access_mode: Word | None = None
    """Access mode of the claim that Conveyor created for `model.cache`. It never changes."""


class LastStart(_StatusModel):
    """The latest start of an engine pod, from its creation until it was ready. The parts follow each other."""

    pod_name: Word | None = None
    """Name of the pod."""
    total: Duration | None = None
    """Total time."""
    schedule: Duration | None = None
    """Time until a node was found."""
    image: Duration | None = None
    """Then, time until the first container ran: pulling the image and mounting the volumes."""
    model: Duration | None = None
    """Then, time to download the model, or to find it on the volume."""
    load: Duration | None = None
    """Then, time until the engine had loaded the weights and was ready; includes the warm-up if `warmUp` is not set."""
    warm_up: Duration | None = None
    """Time of the engine's warm-up, which the engine reports shortly after it is ready; not with `runtime: VLLM`."""


class LastFailure(_StatusModel):
    """The latest failure of an engine pod; stays when the pod is gone."""

    reason: Word | None = None
    """Reason of the failure, as one CamelCase word."""
    message: Message | None = None
    """Explanation of the failure, as a sentence."""
    pod_name: Word | None = None
    """Name of the pod."""
    exit_code: int | None = None
    """Exit code of the process."""
    time: Time | None = None
    """Time of the failure."""


MAX_LISTED_ADAPTERS: Final = 100  # the whole object has a limit of 1.5 MiB


class AdapterStatus(_StatusModel):
    """One adapter of `spec.adapters`."""

    name: Word
    """Name of the adapter."""
    state: Literal["Loading", "Ready", "Failed"]
    """Ready: all ready engines have it. Failed: at least one cannot load it, and tries again."""
    replicas: Count = 0
    """Engines that answer requests for it."""
    message: Message | None = None
    """Why an engine cannot load it."""


class InferenceServiceStatus(_StatusModel):
    """The observed state. Only Conveyor writes it."""

    observed_generation: Annotated[int, Field(ge=-1)] | None = None
    """`metadata.generation` that this status is about; -1 until the operator has seen the service."""
    conditions: Annotated[list[Condition], Field(max_length=16), KeyedBy("type")] = Field(default_factory=list)
    """Conditions of the service."""
    replicas: Count | None = None
    """Pods that exist."""
    ready_replicas: Count | None = None
    """Pods that answer requests."""
    starting_replicas: Count | None = None
    """Pods that are expected to be ready soon: not ready, without a failure, and with a running container or younger
    than `effective.scaleUpPeriod`."""
    starting_until: Time | None = None
    """When `startingReplicas` counts as 0, unless the operator has extended this time. It does so while pods start."""
    updated_replicas: Count | None = None
    """Pods of the current spec."""
    desired_replicas: Count | None = None
    """Pods that are desired now."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """Selects the pods; for `/scale`."""
    url: Annotated[str, Field(max_length=1024)] | None = None
    """Base URL for OpenAI clients: at the chart's `gateway.url` if it is set, otherwise at the gateway's Service."""
    effective: EffectiveStatus | None = None
    """Values in use, in particular of fields that the spec does not set."""
    tried_template: Word | None = None
    """Hash of the last pod template with which engines were ready. The Deployment's annotation
    `conveyor.dev/template-hash` has the hash of the present template."""
    children_hash: Word | None = None
    """Hash of the applied child objects, as sent and as stored by the API server. A starting operator applies none of
    them again while this hash is the same."""
    model: ModelStatus | None = None
    """The served model."""
    adapters: Annotated[list[AdapterStatus], Field(max_length=MAX_LISTED_ADAPTERS), KeyedBy("name")] = Field(
        default_factory=list
    )
    """The LoRA adapters. Of more than 100, those that are not Ready go first, and the rest is left out."""
    ready_adapters: Count | None = None
    """Adapters whose state is Ready."""
    autoscaling: AutoscalingStatus | None = None
    """The autoscaler's last decision."""
    last_start: LastStart | None = None
    """The latest start of an engine pod, part by part."""
    last_failure: LastFailure | None = None
    """The latest failure of an engine pod."""

    @property
    def starting_until_unix(self) -> float:
        """`startingUntil` in seconds; infinite without it, as in the status of an earlier release."""
        return datetime.fromisoformat(self.starting_until).timestamp() if self.starting_until else math.inf

    def find_message(self, condition: Condition) -> str:
        """Return the condition's message, or that of `Ready` if the condition refers to it."""
        if not condition.message.endswith(SEE_READY):
            return condition.message
        ready = (each.message for each in self.conditions if each.type == ConditionType.READY)
        return next(ready, condition.message)
