"""The engine's Deployment. Pure.

One initContainer fetches or checks the model, one container serves it. The pods meet the "restricted" Pod Security
standard. No label or annotation in the template names a version: an upgrade of the operator must not restart GPUs.
For the same reason a test holds the rendered template, so that only a deliberate change alters it.
"""

from math import ceil
from typing import Any

from conveyor_api import names
from conveyor_api.model import VolumeModel
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.inferenceservice.manifests.config import EngineConfig
from conveyor_operator.inferenceservice.manifests.model import build_model_mount, build_model_volume
from conveyor_operator.inferenceservice.observed import TEMPLATE_HASH_ANNOTATION
from conveyor_operator.loop.owner import Object, Owner, build_metadata

ENGINE_CONTAINER = "engine"
FETCH_CONTAINER = "fetch"

_USER_ID = 65532
_PRE_STOP_SECONDS = 5  # time for the gateways to see that the pod leaves, before it refuses requests
_EXIT_MARGIN_SECONDS = 10
_STARTUP_PERIOD_SECONDS = 2
_STARTUP_SECONDS = 30 * 60  # reading a large model from a slow disk, compiling, warming up
# Longer than the longest sensible download plus the start-up: an unfinished rollout is not an error before that.
_PROGRESS_DEADLINE_SECONDS = 2 * 60 * 60
_SHARED_MEMORY_SIZE = "1Gi"
_SCRATCH_SIZE = "2Gi"  # compilers' caches; CUDA's alone may take 1 GiB
_COMPUTE = ("cpu", "memory", "ephemeral-storage")
_SCRATCH_MOUNT = {"name": "scratch", "mountPath": "/tmp"}


def build_deployment(
    owner: Owner, spec: InferenceServiceSpec, template: Object, image: str, template_hash: str
) -> Object:
    """`template` is one of `build_pod_template`, `template_hash` that of `image.hash_template`. It has no replicas."""
    metadata = build_metadata(owner, names.engine_name(owner.name))
    metadata["annotations"] = {TEMPLATE_HASH_ANNOTATION: template_hash}
    rollout = {"maxSurge": spec.rollout.max_surge, "maxUnavailable": spec.rollout.max_unavailable}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": names.pod_selector(owner.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": rollout},
            "progressDeadlineSeconds": _PROGRESS_DEADLINE_SECONDS,
            "revisionHistoryLimit": 1,
            "template": _with_image(template, image),
        },
    }


def build_pod_template(owner: Owner, spec: InferenceServiceSpec, config: EngineConfig) -> Object:
    """With the image that the spec names; without one the image is empty, and `build_deployment` sets it."""
    return {
        "metadata": {
            "labels": names.child_labels(owner.name),
            "annotations": {names.CONFIG_HASH_ANNOTATION: config.hash},
        },
        "spec": {
            "serviceAccountName": names.engine_name(owner.name),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": _PRE_STOP_SECONDS
            + ceil(spec.drain.timeout_seconds)
            + _EXIT_MARGIN_SECONDS,
            "securityContext": _pod_security(spec),
            "initContainers": [_fetch_container(spec)],
            "containers": [_engine_container(spec)],
            "volumes": _volumes(owner, spec, config),
            **_scheduling(spec),
        },
    }


def _with_image(template: Object, image: str) -> Object:
    pods = template["spec"]
    imaged = {
        containers: [{**container, "image": image} for container in pods[containers]]
        for containers in ("initContainers", "containers")
    }
    return {**template, "spec": {**pods, **imaged}}


def _fetch_container(spec: InferenceServiceSpec) -> Object:
    target = spec.model.source.directory
    command = ["python", "-m", "conveyor_engine", "fetch", "--uri", spec.model.uri, "--target", target]
    token = []
    if spec.model.secret_ref is not None:
        reference = {"name": spec.model.secret_ref.name, "key": spec.model.secret_ref.key}
        token = [{"name": names.HUB_TOKEN_ENV, "valueFrom": {"secretKeyRef": reference}}]
    return {
        "name": FETCH_CONTAINER,
        "image": spec.engine.image or "",
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": _env(spec, token),
        "resources": _without_devices(_resources(spec)),
        "volumeMounts": [build_model_mount(spec), _SCRATCH_MOUNT],
        **_container_rules(),
    }


def _engine_container(spec: InferenceServiceSpec) -> Object:
    port = {"name": names.ENGINE_PORT_NAME, "containerPort": names.ENGINE_PORT, "protocol": "TCP"}
    config_mount = {"name": "config", "mountPath": names.ENGINE_CONFIG_PATH.rpartition("/")[0], "readOnly": True}
    return {
        "name": ENGINE_CONTAINER,
        "image": spec.engine.image or "",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "conveyor_engine", "serve", "--config", names.ENGINE_CONFIG_PATH],
        "env": _env(spec, []),
        "ports": [port],
        "resources": _resources(spec),
        "volumeMounts": [
            config_mount,
            build_model_mount(spec) | {"readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            _SCRATCH_MOUNT,
        ],
        "startupProbe": _probe(
            names.READINESS_PATH, _STARTUP_PERIOD_SECONDS, _STARTUP_SECONDS // _STARTUP_PERIOD_SECONDS
        ),
        "readinessProbe": _probe(names.READINESS_PATH, period_seconds=5, failures=2),
        "livenessProbe": _probe(names.LIVENESS_PATH, period_seconds=10, failures=6),
        "lifecycle": {"preStop": {"sleep": {"seconds": _PRE_STOP_SECONDS}}},
        **_container_rules(),
    }


def _container_rules() -> Object:
    # NVIDIA's container hooks write to the root file system as well, but before the runtime makes it read-only.
    return {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationMessagePath": names.TERMINATION_LOG_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _pod_security(spec: InferenceServiceSpec) -> Object:
    rules: Object = {
        "runAsNonRoot": True,
        "runAsUser": _USER_ID,
        "runAsGroup": _USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if not isinstance(spec.model.source, VolumeModel):
        # The group makes the cache writable. A user's own claim is never changed, not even its group.
        rules |= {"fsGroup": _USER_ID, "fsGroupChangePolicy": "OnRootMismatch"}
    return rules


def _env(spec: InferenceServiceSpec, more: list[Object]) -> list[Object]:
    """The user's variables, then ours, which win: a name may stand in the list once."""
    ours = [{"name": names.TERMINATION_LOG_ENV, "value": names.TERMINATION_LOG_PATH}, *more]
    taken = {variable["name"] for variable in ours}
    theirs = [variable.to_manifest() for variable in spec.engine.env]
    result = [variable for variable in theirs if variable["name"] not in taken] + ours
    if not any(variable["name"] == "HOME" for variable in result):
        result.append({"name": "HOME", "value": "/tmp"})  # caches of compilers; uid 65532 has no home in most images
    return result


def _probe(path: str, period_seconds: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": names.ENGINE_PORT_NAME, "scheme": "HTTP"},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _volumes(owner: Owner, spec: InferenceServiceSpec, config: EngineConfig) -> list[Object]:
    return [
        {"name": "config", "configMap": {"name": names.config_map_name(owner.name, config.hash)}},
        build_model_volume(owner, spec),
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY_SIZE}},
        {"name": "scratch", "emptyDir": {"sizeLimit": _SCRATCH_SIZE}},
    ]


def _resources(spec: InferenceServiceSpec) -> dict[str, dict[str, Any]]:
    return {kind: dict(amounts) for kind, amounts in spec.resources.to_manifest().items() if amounts}


def _without_devices(resources: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """CPU and memory only: fetching needs no GPU, but a quota may ask every container for its share."""
    return {
        kind: {name: value for name, value in amounts.items() if name in _COMPUTE}
        for kind, amounts in resources.items()
    }


def _scheduling(spec: InferenceServiceSpec) -> Object:
    asked: Object = {key: value for key, value in spec.scheduling.to_manifest().items() if value}
    if any(name.startswith(names.GPU_VENDOR) for name in spec.resources.limits):
        # Nodes with GPUs carry this taint, so that nothing else takes their place.
        taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        asked["tolerations"] = [taint, *asked.get("tolerations", [])]
    if spec.image_pull_secrets:
        asked["imagePullSecrets"] = [secret.to_manifest() for secret in spec.image_pull_secrets]
    return asked
