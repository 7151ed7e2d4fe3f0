"""Builds the pod template of engines. Pure.

An initContainer fetches or checks the model, and a container serves it. One more initContainer fetches a draft model,
and one each adapter with a Secret. `tls` changes ports and probes afterwards. The pods meet the "restricted" Pod
Security standard. Labels and annotations contain no version, so that an upgrade of the operator restarts no engine. For
the same reason a test compares the rendered template, so that only deliberate changes alter it.
"""

from collections.abc import Mapping
from math import ceil

from conveyor_api import names
from conveyor_api.adapters import Adapter
from conveyor_api.model import Model, Mounted
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.inferenceservice.manifests.adapters import AdapterVolumes, plan_adapter_volumes
from conveyor_operator.inferenceservice.manifests.config import EngineConfig
from conveyor_operator.inferenceservice.manifests.credentials import (
    build_credentials_arguments,
    build_credentials_mount,
    build_credentials_volume,
)
from conveyor_operator.inferenceservice.manifests.environment import build_environment, exempt_cluster, select_for_fetch
from conveyor_operator.inferenceservice.manifests.model import build_model_mount, build_model_volume
from conveyor_operator.inferenceservice.manifests.program import ENGINE, PRE_STOP_SECONDS
from conveyor_operator.inferenceservice.manifests.resources import complete_resources, without_devices
from conveyor_operator.inferenceservice.manifests.scheduling import select_engines
from conveyor_operator.inferenceservice.manifests.vllm import build_vllm
from conveyor_operator.loop.owner import Object, Owner

ENGINE_CONTAINER = "engine"
FETCH_CONTAINER = "fetch"
DRAFT_CONTAINER = "fetch-draft"

_EXIT_MARGIN_SECONDS = 10
_STARTUP_PERIOD_SECONDS = 2
_STARTUP_DELAY_SECONDS = 4  # no engine is ready earlier, because it imports torch. Each failed probe is an Event
_EMPTY_DIRS: Mapping[str, Object] = {
    names.SHARED_MEMORY_VOLUME: {"medium": "Memory", "sizeLimit": "1Gi"},
    names.SCRATCH_VOLUME: {"sizeLimit": "2Gi"},  # compilers' caches; CUDA's alone may take 1 GiB
}
_AS_GIVEN = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "imagePullSecrets",
    "resourceClaims",
    "dnsConfig",
    "hostAliases",
)
_FETCH_VARIABLES = {"HF_HUB_DISABLE_TELEMETRY": "1"}  # otherwise the hub's library also sends torch's version
_SCRATCH_MOUNT = {"name": names.SCRATCH_VOLUME, "mountPath": "/tmp"}


def build_pod_template(
    owner: Owner, spec: InferenceServiceSpec, config: EngineConfig, user_id: int, cluster_domain: str
) -> Object:
    """Build the pod template. An image that the spec does not name stays empty until `build_deployment` sets it.

    `user_id` is the user and group of the processes and the group of their files; with 0 the platform chooses.
    """
    adapters = plan_adapter_volumes(owner, spec)
    fetches = [exempt_cluster(each, cluster_domain) for each in _fetch_containers(spec, adapters)]
    return {
        "metadata": {
            "labels": {**spec.pod.labels, **names.child_labels(owner.name)},
            "annotations": {**spec.pod.annotations, names.CONFIG_HASH_ANNOTATION: config.hash},
        },
        "spec": {
            "serviceAccountName": spec.pod.service_account_name or names.engine_name(owner.name),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": PRE_STOP_SECONDS + ceil(spec.drain.timeout_seconds) + _EXIT_MARGIN_SECONDS,
            "securityContext": _pod_security(spec, user_id),
            "initContainers": fetches,
            "containers": [exempt_cluster(_engine_container(spec, adapters), cluster_domain)],
            "volumes": _volumes(owner, spec, config, adapters),
            **select_engines(_as_given(spec), owner.name),
        },
    }


def _fetch_containers(spec: InferenceServiceSpec, adapters: AdapterVolumes) -> list[Object]:
    return [_fetch_container(spec, *fetch) for fetch in _list_fetches(spec, adapters)]


def _list_fetches(spec: InferenceServiceSpec, adapters: AdapterVolumes) -> list[tuple[str, Model | Adapter, Object]]:
    """Return the name of each fetch container, what it fetches or checks, and the mount of the volume for this."""
    draft = spec.draft_model
    return [
        (FETCH_CONTAINER, spec.model, build_model_mount(spec)),
        *([] if draft is None else [(DRAFT_CONTAINER, draft, build_model_mount(spec))]),
        *(
            (f"{FETCH_CONTAINER}-adapter-{number}", adapter, mount)
            for number, (adapter, mount) in enumerate(adapters.fetches)
        ),
    ]


def _fetch_container(spec: InferenceServiceSpec, name: str, fetched: Model | Adapter, mount: Object) -> Object:
    target, named = fetched.source.directory, list[str]()
    if isinstance(fetched, Adapter):
        target, named = fetched.directory, [names.ADAPTER_FLAG, fetched.name]
    fetch = ["fetch", "--uri", fetched.uri, "--target", target, *build_credentials_arguments(fetched), *named]
    return {
        "name": name,
        "image": "" if spec.runtime == "VLLM" else spec.engine.image or "",  # a fetch needs Conveyor's image
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "conveyor_engine", *fetch],
        "env": build_environment(select_for_fetch(spec), _build_fetch_variables(spec, fetched), _FETCH_VARIABLES),
        "resources": without_devices(complete_resources(spec.resources)),
        "volumeMounts": [mount, _SCRATCH_MOUNT, *build_credentials_mount(fetched, name), *_mounts(spec)],
        **_container_rules(spec),
    }


def _build_fetch_variables(spec: InferenceServiceSpec, fetched: Model | Adapter) -> list[Object]:
    """Return the task that the fetch cannot find out, or that Conveyor's engine has no part in."""
    task = names.NO_TASK if spec.runtime == "VLLM" else (spec.task or "").lower()
    return [{"name": f"{names.ENGINE_ENV_PREFIX}TASK", "value": task}] if task and isinstance(fetched, Model) else []


def _engine_container(spec: InferenceServiceSpec, adapters: AdapterVolumes) -> Object:
    port = {"name": names.ENGINE_PORT_NAME, "containerPort": names.ENGINE_PORT, "protocol": "TCP"}
    config_mount = {
        "name": names.CONFIG_VOLUME,
        "mountPath": names.ENGINE_CONFIG_PATH.rpartition("/")[0],
        "readOnly": True,
    }
    program = build_vllm(spec) if spec.runtime == "VLLM" else ENGINE
    return {
        "name": ENGINE_CONTAINER,
        "image": spec.engine.image or "",
        "imagePullPolicy": "IfNotPresent",
        "command": list(program.command),
        "env": build_environment(spec.pod.env, [], program.variables),
        "ports": [port],
        "resources": complete_resources(spec.resources) | _claims(spec),
        "volumeMounts": [
            config_mount,
            build_model_mount(spec) | {"readOnly": True},
            *adapters.mounts,
            {"name": names.SHARED_MEMORY_VOLUME, "mountPath": "/dev/shm"},
            _SCRATCH_MOUNT,
            *_mounts(spec),
        ],
        "startupProbe": {
            **_probe(
                program.readiness_path,
                _STARTUP_PERIOD_SECONDS,
                ceil(spec.engine.startup_timeout_seconds / _STARTUP_PERIOD_SECONDS),
            ),
            "initialDelaySeconds": _STARTUP_DELAY_SECONDS,
        },
        "readinessProbe": _probe(program.readiness_path, period_seconds=5, failures=2),
        "livenessProbe": _probe(program.liveness_path, period_seconds=10, failures=6),
        "lifecycle": {"preStop": program.pre_stop},
        **_container_rules(spec),
    }


def _container_rules(spec: InferenceServiceSpec) -> Object:
    # NVIDIA's container hooks can still write to the root file system: they run before the runtime makes it read-only.
    return {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": _security(spec).get("seccompProfile", {"type": "RuntimeDefault"}),
        },
        "terminationMessagePath": names.TERMINATION_LOG_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _pod_security(spec: InferenceServiceSpec, user_id: int) -> Object:
    rules: Object = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if user_id:
        rules |= {"runAsUser": user_id, "runAsGroup": user_id}
    if not isinstance(spec.model.source, Mounted):
        # The group makes the cache writable. A volume that already contains the model keeps its group.
        rules |= {"fsGroupChangePolicy": "OnRootMismatch"} | ({"fsGroup": user_id} if user_id else {})
    return rules | _security(spec)


def _security(spec: InferenceServiceSpec) -> Object:
    given: Object = spec.pod.to_manifest().get("securityContext", {})
    return given


def _probe(path: str, period_seconds: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": names.ENGINE_PORT_NAME, "scheme": "HTTP"},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _volumes(owner: Owner, spec: InferenceServiceSpec, config: EngineConfig, adapters: AdapterVolumes) -> list[Object]:
    given: list[Object] = spec.pod.to_manifest().get("volumes", [])
    replaced = {volume["name"] for volume in given}
    return [
        {"name": names.CONFIG_VOLUME, "configMap": {"name": names.config_map_name(owner.name, config.hash)}},
        build_model_volume(owner, spec),
        *adapters.volumes,
        *(
            volume
            for name, fetched, _ in _list_fetches(spec, adapters)
            for volume in build_credentials_volume(spec, fetched, name)
        ),
        *({"name": name, "emptyDir": content} for name, content in _EMPTY_DIRS.items() if name not in replaced),
        *given,
    ]


def _mounts(spec: InferenceServiceSpec) -> list[Object]:
    mounts: list[Object] = spec.pod.to_manifest().get("volumeMounts", [])
    return mounts


def _claims(spec: InferenceServiceSpec) -> dict[str, list[Object]]:
    claims: list[Object] = [{"name": claim.name} for claim in spec.pod.resource_claims]
    return {"claims": claims} if claims else {}


def _as_given(spec: InferenceServiceSpec) -> Object:
    """Return the fields of the pods that come from the spec. Pods with GPUs also get a toleration."""
    given = spec.pod.to_manifest()
    chosen: Object = {key: given[key] for key in _AS_GIVEN if given.get(key)}
    if spec.pod.host_users is not None:
        chosen["hostUsers"] = spec.pod.host_users
    if any(name.startswith(names.GPU_VENDOR) for name in spec.resources.limits):
        # Some platforms, such as GKE, set this taint on nodes with GPUs, so that other pods do not use them.
        taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        chosen["tolerations"] = [taint, *chosen.get("tolerations", [])]
    return chosen
