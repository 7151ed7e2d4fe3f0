"""`status`: what the operator has seen. Written by it alone, through the `/status` subresource.

Read leniently (unknown fields are ignored), since after a downgrade a newer operator's status may still be there.
Texts have limits here; `text.clip` shortens what is longer before it is sent.
"""

from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field

from conveyor_api.base import ApiModel, KeyedBy
from conveyor_api.quantities import Duration, IntOrPercent
from conveyor_api.queue import MAX_CLASSES
from conveyor_api.text import MAX_MESSAGE_BYTES

MAX_CONTEXT_LENGTH: Final = 16_777_216
NUM_POD_STARTS: Final = 3

Message = Annotated[str, Field(max_length=MAX_MESSAGE_BYTES)]
Word = Annotated[str, Field(max_length=253)]
Count = Annotated[int, Field(ge=0)]
Amounts = Annotated[dict[str, Annotated[str, Field(max_length=32)]], Field(max_length=8)]
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
    """Why, as one CamelCase word: see Reasons."""
    message: Message = ""
    """Why, as a sentence."""
    observed_generation: Count | None = None
    """`metadata.generation` of the spec that it was judged by."""
    last_transition_time: Time
    """When `status` last changed."""


class ModelStatus(_StatusModel):
    """The served model."""

    name: Annotated[str, Field(max_length=128)] | None = None
    """Name that clients put in `model`."""
    uri: Annotated[str, Field(max_length=512)] | None = None
    """Source of the model that `contextLength` and `task` are about."""
    context_length: Annotated[int, Field(ge=2, le=MAX_CONTEXT_LENGTH)] | None = None
    """Longest context that the model was made for, in tokens, as its files say; an edit that asks for more is
    refused, and the pods run on."""
    task: Annotated[str, Field(max_length=63)] | None = None
    """Task of the model: `spec.task`, or the one detected from its files."""


class MetricStatus(_StatusModel):
    """One metric that the autoscaler looks at."""

    name: Word
    """Name of the metric."""
    current: Annotated[str, Field(max_length=32)] | None = None
    """Value per replica at the decision, as a quantity; `kubectl get hpa` has the present one."""
    target: Annotated[str, Field(max_length=32)] | None = None
    """Value per replica that is aimed at, as a quantity."""


class AutoscalingStatus(_StatusModel):
    """The autoscaler's last decision, with the metric values behind it. It changes only with the decision."""

    desired_replicas: Count | None = None
    """Replicas that it wants."""
    reason: Word | None = None
    """Why that number, in one word: Decided; AtMaximum, more are wished for; Stabilized or Limited, held by `behavior`;
    Pending, not acted on yet; NoMetrics; ScaledToZero; Woken, from zero by a request."""
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
    """Its name."""
    level: Count
    """Lower levels go first."""
    max_requests: Count | None = None
    """Requests of it that may wait."""
    timeout: Word | None = None
    """Longest wait for a place on an engine."""
    overtaken_for: Word | None = None
    """A waiting request of this class is overtaken only by requests that arrive so long after it, at most."""


class DerivedStatus(_StatusModel):
    """One size that follows from `spec.workload`."""

    name: Word
    """The field that would set it, or what else has the size."""
    value: Annotated[str, Field(max_length=64)]
    """The size."""
    reason: Message
    """Why, as a sentence."""


class EffectiveStatus(_StatusModel):
    """What holds where the spec leaves something open."""

    image: Annotated[str, Field(max_length=512)] | None = None
    """Image that the pods run; kept until the spec changes, so that an upgrade of Conveyor restarts no engine."""
    mode: Word | None = None
    """How requests become batches: `batching.mode`, or the default of the model's task."""
    max_batch_size: Count | None = None
    """Requests that run together on one engine; the autoscaler aims by it."""
    window: Word | None = None
    """How long a batch waits for company since its first request, in modes that have a window."""
    max_surge: IntOrPercent | None = None
    """Pods above the wanted number while pods are replaced; at present, where `rollout` leaves it open."""
    max_unavailable: IntOrPercent | None = None
    """Pods that may be missing while pods are replaced, likewise."""
    pod_starts: Annotated[list[Duration], Field(max_length=NUM_POD_STARTS)] | None = None
    """How long the pods that started last took from their creation until they were ready, the newest last."""
    scale_up_period: Duration | None = None
    """Period of the policies of scaling up, where `behavior` does not name them: the slowest of `podStarts` (5 minutes
    until there are any) and two queue time-outs, of a minute at most each."""
    resources: ResourcesStatus | None = None
    """Resources of the engine's container, with the requests that Conveyor adds."""
    queue_classes: Annotated[list[QueueClassStatus], Field(max_length=MAX_CLASSES), KeyedBy("name")] | None = None
    """Classes of the queue with their limits, the best first."""
    from_profile: Annotated[list[Word], Field(max_length=64)] | None = None
    """Fields of the spec that its profile has filled."""
    derived: Annotated[list[DerivedStatus], Field(max_length=8), KeyedBy("name")] | None = None
    """Sizes that follow from `spec.workload`, without those that a field sets."""
    cache_access_mode: Word | None = None
    """Access mode of the claim that Conveyor made for `model.cache`; it never changes."""


class LastStart(_StatusModel):
    """The latest start of an engine pod, from its creation until it was ready; its parts follow each other."""

    pod_name: Word | None = None
    """Which pod."""
    total: Duration | None = None
    """All of it."""
    schedule: Duration | None = None
    """Until a node was found."""
    image: Duration | None = None
    """Until its first container ran: the image was pulled, the volumes were mounted."""
    model: Duration | None = None
    """The model was fetched, or found in the volume."""
    load: Duration | None = None
    """The engine read the weights and was found ready; with its warm-up, where `warmUp` does not tell that."""
    warm_up: Duration | None = None
    """The engine warmed up, as it says itself a moment after it is ready. With `runtime: VLLM` it does not say."""


class LastFailure(_StatusModel):
    """The latest failure of an engine pod; stays when the pod is gone."""

    reason: Word | None = None
    """Why, as one CamelCase word."""
    message: Message | None = None
    """Why, as a sentence."""
    pod_name: Word | None = None
    """Which pod."""
    exit_code: int | None = None
    """How the process ended."""
    time: Time | None = None
    """When."""


class InferenceServiceStatus(_StatusModel):
    """The observed state. Only Conveyor writes it."""

    observed_generation: Count | None = None
    """`metadata.generation` that this status is about."""
    conditions: Annotated[list[Condition], Field(max_length=16), KeyedBy("type")] = Field(default_factory=list)
    """The state, aspect by aspect."""
    replicas: Count | None = None
    """Pods that exist."""
    ready_replicas: Count | None = None
    """Pods that answer requests."""
    updated_replicas: Count | None = None
    """Pods of the present spec."""
    desired_replicas: Count | None = None
    """Pods that are wanted now."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """Selects the pods; for `/scale`."""
    url: Annotated[str, Field(max_length=1024)] | None = None
    """Base URL for OpenAI clients: at the chart's `gateway.url` if that is set, else at the gateway's Service."""
    effective: EffectiveStatus | None = None
    """What holds where the spec leaves something open."""
    tried_template: Word | None = None
    """Hash of the last pod template of which engines were ready; the annotation `conveyor.dev/template-hash` of the
Deployment has that of the present one."""
    children_hash: Word | None = None
    """Hash of the objects that were applied for this service: of what was sent, and of what came of it. An operator
    that starts applies none of them again while it is the same."""
    model: ModelStatus | None = None
    """The served model."""
    autoscaling: AutoscalingStatus | None = None
    """The autoscaler's last decision."""
    last_start: LastStart | None = None
    """The latest start of an engine pod, part by part."""
    last_failure: LastFailure | None = None
    """The latest failure of an engine pod."""
