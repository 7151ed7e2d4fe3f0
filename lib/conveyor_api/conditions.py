"""The conditions of an InferenceService, and the meaning of each reason that they may have.

This module defines which reason belongs to which condition. The operator decides when a reason applies, and writes the
conditions. The API reference lists the meanings.
"""

from enum import StrEnum
from typing import Final

from conveyor_protocol.failure_reasons import OF_THE_MODEL, FailureReason


class ConditionType(StrEnum):
    """The type of a condition. `Ready` summarises all others except `NameClaimed`.

    Only abnormal states have `Reconciling` or `Stalled`. GitOps tools read these two by the rules of kstatus.
    """

    READY = "Ready"
    PROGRESSING = "Progressing"
    MODEL_AVAILABLE = "ModelAvailable"
    WORKLOAD_READY = "WorkloadReady"
    ENDPOINT_READY = "EndpointReady"
    SCALING_READY = "ScalingReady"
    NAME_CLAIMED = "NameClaimed"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"


# Conditions that are present only while they are True.
ABNORMAL: Final = frozenset({ConditionType.RECONCILING, ConditionType.STALLED})

CONDITION_MEANINGS: Final[dict[ConditionType, str]] = {
    ConditionType.READY: (
        "The service answers requests: an engine is ready, or a request starts one from zero. It is also True with "
        "`replicas: 0`: no engine is desired. If False, the reason is the cause. If True, the reason is usually "
        "Ready. While some engines fail, it is their failure. After a start or a failure, it is PodsStarting until all "
        "desired engines are ready. If each engine requests more GPUs than it uses, it is GPUsUnused."
    ),
    ConditionType.PROGRESSING: (
        "Pods of the current spec are being created, the first ones or those of a rollout. Scaling does not count."
    ),
    ConditionType.MODEL_AVAILABLE: "At least one engine has found, downloaded and loaded the model.",
    ConditionType.WORKLOAD_READY: "All desired engines are ready.",
    ConditionType.ENDPOINT_READY: "The gateway has at least one engine to send requests to.",
    ConditionType.SCALING_READY: "The autoscaler works, or the number of replicas is fixed.",
    ConditionType.NAME_CLAIMED: (
        "At the gateway's root, requests reach this service by its served name. If False, they reach it there as "
        "`NAMESPACE/NAME`. The service's own URL works in both cases."
    ),
    ConditionType.RECONCILING: (
        "True while the current spec is not rolled out, or no engine answers, and this may pass without action. "
        "Otherwise absent. Helm, Flux and Config Sync then wait."
    ),
    ConditionType.STALLED: (
        "True if the rollout or the only engine has failed, and somebody has to act. Otherwise absent. A failure that "
        "may pass does so when the Deployment exceeds its progress deadline. A contested HPA, PodDisruptionBudget or "
        "Service is no failed rollout. Helm, Flux and Config Sync then report a failure."
    ),
}


SEE_READY: Final = "see Ready"
"""The end of a condition's message if `Ready` has the whole message about the same cause."""


class Reason(StrEnum):
    """The reason for a condition's status."""

    # Everything works.
    READY = "Ready"
    UP_TO_DATE = "UpToDate"
    MODEL_LOADED = "ModelLoaded"
    REPLICAS_READY = "ReplicasReady"
    ENDPOINTS_AVAILABLE = "EndpointsAvailable"
    SCALING_ACTIVE = "ScalingActive"
    FIXED_REPLICAS = "FixedReplicas"
    EXTERNAL_AUTOSCALER = "ExternalAutoscaler"
    SCALED_TO_ZERO = "ScaledToZero"
    STARTING_FROM_ZERO = "StartingFromZero"
    # Everything works, but resources are unused.
    GPUS_UNUSED = "GPUsUnused"
    # In progress.
    ROLLING_OUT = "RollingOut"
    MODEL_DOWNLOADING = "ModelDownloading"
    MODEL_LOADING = "ModelLoading"
    PODS_STARTING = "PodsStarting"
    NO_READY_ENDPOINTS = "NoReadyEndpoints"
    WAITING_FOR_AUTOSCALER = "WaitingForAutoscaler"
    # The resource, or an object that it needs, is wrong.
    INVALID_SPEC = "InvalidSpec"
    CHILD_REFUSED = "ChildRefused"
    CHILD_NOT_OWNED = "ChildNotOwned"
    CONTESTED = "Contested"
    CLAIM_NOT_FOUND = "ClaimNotFound"
    # The model is missing or cannot be used; the engine reports it. Kubernetes also reports SECRET_NOT_FOUND.
    SECRET_NOT_FOUND = FailureReason.SECRET_NOT_FOUND.value
    MODEL_NOT_FOUND = FailureReason.MODEL_NOT_FOUND.value
    MODEL_DOWNLOAD_FAILED = FailureReason.MODEL_DOWNLOAD_FAILED.value
    MODEL_UNREADABLE = FailureReason.MODEL_UNREADABLE.value
    CHECKSUM_MISMATCH = FailureReason.CHECKSUM_MISMATCH.value
    UNSUPPORTED_MODEL = FailureReason.UNSUPPORTED_MODEL.value
    # The engine cannot run; it reports the reason itself.
    INVALID_CONFIG = FailureReason.INVALID_CONFIG.value
    NO_DEVICE = FailureReason.NO_DEVICE.value
    KV_BUDGET_TOO_LARGE = FailureReason.KV_BUDGET_TOO_LARGE.value
    KV_BUDGET_TOO_SMALL = FailureReason.KV_BUDGET_TOO_SMALL.value
    OUT_OF_MEMORY = FailureReason.OUT_OF_MEMORY.value
    ENGINE_ERROR = FailureReason.ENGINE_ERROR.value
    # The pod cannot run; Kubernetes reports it. The engine also reports OOM_KILLED, for its child processes.
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_CONFIG_INVALID = "ContainerConfigInvalid"
    OOM_KILLED = FailureReason.OOM_KILLED.value
    CRASH_LOOP = "CrashLoop"
    INSUFFICIENT_GPU = "InsufficientGPU"
    UNSCHEDULABLE = "Unschedulable"
    PODS_REFUSED = "PodsRefused"
    NODE_LOST = "NodeLost"
    ROLLED_BACK = "RolledBack"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    # Scaling does not work.
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    METRICS_API_OWNED_BY_OTHER = "MetricsAPIOwnedByOther"
    KEDA_NOT_INSTALLED = "KEDANotInstalled"
    AUTOSCALER_FAILED = "AutoscalerFailed"
    # The served name at the gateway's root.
    NAME_CLAIMED = "NameClaimed"
    NAME_PENDING = "NamePending"
    NAME_TAKEN = "NameTaken"
    TOO_MANY_NAMES = "TooManyNames"
    NAME_NOT_ALLOWED = "NameNotAllowed"


REASON_MEANINGS: Final[dict[Reason, str]] = {
    Reason.READY: "The service answers requests. All desired engines are ready, or only a scaling or a rollout is "
    "not complete yet.",
    Reason.UP_TO_DATE: "All pods run the current spec.",
    Reason.MODEL_LOADED: "At least one engine has loaded the model.",
    Reason.REPLICAS_READY: "All desired engines are ready.",
    Reason.ENDPOINTS_AVAILABLE: "The gateway has at least one ready engine.",
    Reason.SCALING_ACTIVE: "The autoscaler reads its metrics and decides.",
    Reason.FIXED_REPLICAS: "No autoscaling: the number of engines is `spec.replicas`.",
    Reason.EXTERNAL_AUTOSCALER: "With `provider: External` an autoscaler that is not Conveyor's sets the number.",
    Reason.SCALED_TO_ZERO: "The service has 0 replicas; with `minReplicas: 0` the next request starts an engine.",
    Reason.STARTING_FROM_ZERO: "The first engine after zero is starting, nothing has failed, and requests wait for it.",
    Reason.GPUS_UNUSED: "Each engine requests more GPUs than it uses. Only models that generate text use several.",
    Reason.ROLLING_OUT: "A rollout is replacing pods with pods of the current spec.",
    Reason.MODEL_DOWNLOADING: "The first engine, or a Job before it, is downloading the model.",
    Reason.MODEL_LOADING: "The first engine is loading the model, or checking it in the volume.",
    Reason.PODS_STARTING: "Fewer engines are ready than desired; nothing has failed.",
    Reason.NO_READY_ENDPOINTS: "No engine is ready; requests wait in the gateway.",
    Reason.WAITING_FOR_AUTOSCALER: "The autoscaler has not decided yet.",
    Reason.INVALID_SPEC: "The spec is invalid; the message names the fields.",
    Reason.CHILD_REFUSED: "The API server refused to store a child object; the message is its response.",
    Reason.CHILD_NOT_OWNED: "An object with a name that Conveyor needs belongs to something else; delete the "
    "object, or rename the service.",
    Reason.CONTESTED: "Somebody else keeps changing a child object. The operator restores it after pauses of 2 s to 5 "
    "min; the message names the field manager and the fields.",
    Reason.CLAIM_NOT_FOUND: "The PersistentVolumeClaim that the spec names does not exist.",
    Reason.SECRET_NOT_FOUND: "The Secret that the spec names does not exist, or lacks the key.",
    Reason.MODEL_NOT_FOUND: "The source has no such model or revision, or the folder is not a model.",
    Reason.MODEL_DOWNLOAD_FAILED: "The model could not be downloaded; the download is retried.",
    Reason.MODEL_UNREADABLE: "The engine's user may not read a file of the model, or a file is truncated or missing.",
    Reason.CHECKSUM_MISMATCH: "A downloaded file does not match what the hub announced.",
    Reason.UNSUPPORTED_MODEL: "The engine does not support this architecture.",
    Reason.INVALID_CONFIG: "The engine refused its configuration.",
    Reason.NO_DEVICE: "The pod sees no GPU (request one in `resources.limits`, or set device: Auto), or one that "
    "CUDA cannot use (an old driver, compute capability below 8.0); the message says which.",
    Reason.KV_BUDGET_TOO_LARGE: "The configured key-value cache does not fit into the device's memory.",
    Reason.KV_BUDGET_TOO_SMALL: "The key-value cache is too small for one request of maxModelLen.",
    Reason.OUT_OF_MEMORY: "The engine ran out of device memory.",
    Reason.ENGINE_ERROR: "The engine ended with an error.",
    Reason.IMAGE_PULL_FAILED: "A container image cannot be pulled.",
    Reason.CONTAINER_CONFIG_INVALID: "A container cannot start: an object it needs is missing, or its image is wrong.",
    Reason.OOM_KILLED: "The kernel killed the engine for exceeding its memory limit; raise `resources.limits.memory`.",
    Reason.CRASH_LOOP: "A container keeps exiting without reporting a reason.",
    Reason.INSUFFICIENT_GPU: "No node has a free GPU of the requested kind.",
    Reason.UNSCHEDULABLE: "No node can run the pod, for a reason other than GPUs.",
    Reason.PODS_REFUSED: "Pods cannot be created, for example because of a quota.",
    Reason.PROGRESS_DEADLINE_EXCEEDED: "The pods did not become ready in time.",
    Reason.NODE_LOST: "The node of the engines has stopped reporting. The gateway asks the engines whether they "
    "answer, and sends requests to those that do.",
    Reason.ROLLED_BACK: "The rollout failed and left too few engines, so the pods of the former spec were "
    "restored; the message has the cause.",
    Reason.METRICS_UNAVAILABLE: "The autoscaler cannot read its metrics; the replicas do not change.",
    Reason.METRICS_API_OWNED_BY_OTHER: "Another server owns `custom.metrics.k8s.io` in this cluster.",
    Reason.KEDA_NOT_INSTALLED: "The provider is KEDA, but KEDA is not installed; the replicas do not change.",
    Reason.AUTOSCALER_FAILED: "The autoscaler reports an error; the message is the autoscaler's.",
    Reason.NAME_CLAIMED: "The served name belongs to this namespace, and refers to this service.",
    Reason.NAME_PENDING: "The served name is not claimed yet. If the API server refused it, the message says why.",
    Reason.NAME_TAKEN: "The served name is already taken, or refers to an older service of the same namespace.",
    Reason.TOO_MANY_NAMES: "The namespace is at its limit of names; delete a ServedName that you no longer need.",
    Reason.NAME_NOT_ALLOWED: "The served name has the form `NAMESPACE/NAME` of a service in another namespace.",
}

# Reasons that an engine or a model download may write into its termination message: those about the model, and the
# others.
MODEL_FAILURES: Final = frozenset(map(Reason, OF_THE_MODEL))
ENGINE_FAILURES: Final = frozenset(map(Reason, FailureReason)) - MODEL_FAILURES

# Reasons that keep pods from running or from being ready. All conditions that depend on the pods then have this reason.
POD_FAILURES: Final = (
    Reason.CHILD_REFUSED,
    Reason.CHILD_NOT_OWNED,
    Reason.CONTESTED,
    Reason.CLAIM_NOT_FOUND,
    *sorted(MODEL_FAILURES),
    *sorted(ENGINE_FAILURES),
    Reason.IMAGE_PULL_FAILED,
    Reason.CONTAINER_CONFIG_INVALID,
    Reason.CRASH_LOOP,
    Reason.INSUFFICIENT_GPU,
    Reason.UNSCHEDULABLE,
    Reason.PODS_REFUSED,
    Reason.NODE_LOST,
    Reason.PROGRESS_DEADLINE_EXCEEDED,
)

# Failures that usually last until somebody acts. `kubectl conveyor tune` does not wait for their end. The others may
# pass: a restart may end a crash, and a node may be added.
LASTING_FAILURES: Final = frozenset(POD_FAILURES) - {
    Reason.OOM_KILLED,
    Reason.OUT_OF_MEMORY,
    Reason.ENGINE_ERROR,
    Reason.CRASH_LOOP,
    Reason.INSUFFICIENT_GPU,
    Reason.UNSCHEDULABLE,
    Reason.NODE_LOST,
    Reason.PROGRESS_DEADLINE_EXCEEDED,
}

# Failures that may pass when another object arrives or a server is back, although `tune` does not wait for this.
_PASSING_FAILURES: Final = frozenset({Reason.CLAIM_NOT_FOUND, Reason.SECRET_NOT_FOUND, Reason.MODEL_DOWNLOAD_FAILED})

# Failures that make a service `Stalled` at once. The others do when the Deployment exceeds its progress deadline.
STALLING_FAILURES: Final = (LASTING_FAILURES - _PASSING_FAILURES) | {Reason.INVALID_SPEC, Reason.ROLLED_BACK}

REASONS_BY_CONDITION: Final[dict[ConditionType, tuple[Reason, ...]]] = {
    ConditionType.READY: (
        Reason.READY,
        Reason.PODS_STARTING,
        Reason.GPUS_UNUSED,
        Reason.SCALED_TO_ZERO,
        Reason.STARTING_FROM_ZERO,
        Reason.INVALID_SPEC,
    ),
    ConditionType.PROGRESSING: (
        Reason.UP_TO_DATE,
        Reason.MODEL_DOWNLOADING,
        Reason.ROLLING_OUT,
        Reason.PODS_STARTING,
        Reason.INVALID_SPEC,
        Reason.ROLLED_BACK,
        *POD_FAILURES,
    ),
    ConditionType.MODEL_AVAILABLE: (
        Reason.MODEL_LOADED,
        Reason.MODEL_DOWNLOADING,
        Reason.MODEL_LOADING,
        Reason.SCALED_TO_ZERO,
        *POD_FAILURES,
    ),
    ConditionType.WORKLOAD_READY: (
        Reason.REPLICAS_READY,
        Reason.GPUS_UNUSED,
        Reason.SCALED_TO_ZERO,
        Reason.PODS_STARTING,
        *POD_FAILURES,
    ),
    ConditionType.ENDPOINT_READY: (
        Reason.ENDPOINTS_AVAILABLE,
        Reason.NO_READY_ENDPOINTS,
        Reason.SCALED_TO_ZERO,
        *POD_FAILURES,
    ),
    ConditionType.SCALING_READY: (
        Reason.SCALING_ACTIVE,
        Reason.FIXED_REPLICAS,
        Reason.EXTERNAL_AUTOSCALER,
        Reason.SCALED_TO_ZERO,
        Reason.WAITING_FOR_AUTOSCALER,
        Reason.METRICS_UNAVAILABLE,
        Reason.METRICS_API_OWNED_BY_OTHER,
        Reason.KEDA_NOT_INSTALLED,
        Reason.AUTOSCALER_FAILED,
        Reason.CHILD_REFUSED,
        Reason.CHILD_NOT_OWNED,
        Reason.CONTESTED,
    ),
    ConditionType.NAME_CLAIMED: (
        Reason.NAME_CLAIMED,
        Reason.NAME_PENDING,
        Reason.NAME_TAKEN,
        Reason.TOO_MANY_NAMES,
        Reason.NAME_NOT_ALLOWED,
    ),
    ConditionType.RECONCILING: (
        Reason.MODEL_DOWNLOADING,
        Reason.MODEL_LOADING,
        Reason.ROLLING_OUT,
        Reason.PODS_STARTING,
        Reason.NO_READY_ENDPOINTS,
        *POD_FAILURES,
    ),
    ConditionType.STALLED: (Reason.INVALID_SPEC, Reason.ROLLED_BACK, *POD_FAILURES),
}
