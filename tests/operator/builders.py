"""Builds specs, observed states and pods for pure tests. They have only what a test needs."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import yaml

from conveyor_api import names
from conveyor_api.resource import InferenceService
from conveyor_operator.activity.answer import Activity
from conveyor_operator.activity.warm_ups import ReportWarmUp
from conveyor_operator.inferenceservice.desired import Desired, build_desired, build_owner
from conveyor_operator.inferenceservice.observed import DeploymentState, Observed
from conveyor_operator.inferenceservice.pods import ContainerState, PodState
from conveyor_operator.inferenceservice.replica_sets import ReplicaSetState
from conveyor_operator.inferenceservice.resource import InferenceServices, Sources
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.kinds import ObjectKind
from conveyor_operator.loop.child import Child
from conveyor_operator.loop.owner import Object
from conveyor_operator.metrics import Metrics
from conveyor_operator.metrics_api.answer import MetricsApi
from conveyor_operator.served_names.answer import NameAnswer, NameState
from conveyor_operator.settings import Settings

ROLLED_OUT = {"Progressing": ("True", "NewReplicaSetAvailable", "")}
ROLLING_OUT = {"Progressing": ("True", "ReplicaSetUpdated", "")}
NEWEST = ReplicaSetState("template-2", "bbbbbbbb")
FORMER = ReplicaSetState("template-1", "aaaaaaaa")
NOW = datetime(2026, 11, 22, 8, 0, tzinfo=UTC)
OWNER = build_owner("default", "qwen", "uid-1")
SCRATCH = {"name": "scratch", "mountPath": "/tmp"}
SETTINGS = Settings(engine_image="example/engine:1", prometheus_namespaces=("monitoring",))


class QuietSources:
    """Sources that report nothing new."""

    def read_metrics_api(self) -> MetricsApi:
        return MetricsApi()

    def read_activity(self, service: str) -> Activity:
        return Activity.STEADY

    def serves(self, kind: ObjectKind) -> bool | None:
        return False

    def follow_adapters(self, service: str, *, is_pending: bool | None) -> None:
        return None

    def request_warm_up(self, service: str, pod: str, report: ReportWarmUp) -> None:
        pass

    def find_name(self, service: str, name: str) -> NameAnswer:
        return NameAnswer(NameState.HELD)

    def read_issuer(self) -> None:
        return None


def make_services(metrics: Metrics | None = None, sources: Sources | None = None) -> InferenceServices:
    """Build the object that the loop calls."""
    return InferenceServices(SETTINGS, metrics or Metrics(), sources or QuietSources())


def make_resource(generation: int = 1, status: Object | None = None, **spec: Any) -> InferenceService:
    body: Object = {"model": {"uri": "hf://example/model"}}
    metadata = {"name": OWNER.name, "namespace": OWNER.namespace, "uid": OWNER.uid, "generation": generation}
    resource = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": body | spec}
    return InferenceService.parse(resource | {"status": status or {}})


def desire(observed: Observed = Observed(), **spec: Any) -> Desired:  # noqa: B008  it is frozen
    """Return the desired children of a spec, given what exists already."""
    return build_desired(make_resource(**spec), SETTINGS, observed, PodStarts(), NOW)


def build(**spec: Any) -> dict[tuple[str, str], Object]:
    """Return all children of a spec, by (kind, name)."""
    return {(child["kind"], child["metadata"]["name"]): child for child in desire(**spec).children}


def build_one(kind: str, **spec: Any) -> Object:
    (found,) = [child for (k, _), child in build(**spec).items() if k == kind]
    return found


def build_template(**spec: Any) -> Object:
    """Return the template of the engine's pods."""
    template: Object = build_one("Deployment", **spec)["spec"]["template"]
    return template


def build_container(name: str, **spec: Any) -> Object:
    pod = build_template(**spec)["spec"]
    return next(c for c in (*pod["initContainers"], *pod["containers"]) if c["name"] == name)


def build_config(**spec: Any) -> Object:
    """Return the engine's configuration."""
    config: Object = yaml.safe_load(build_one("ConfigMap", **spec)["data"]["engine.yaml"])
    return config


def build_file(name: str, **spec: Any) -> str:
    """Return the file of this name in one of the ConfigMaps."""
    maps = [child["data"] for (kind, _), child in build(**spec).items() if kind == "ConfigMap"]
    (found,) = [files[name] for files in maps if name in files]
    return str(found)


def make_deployment(desired: int = 1, **changes: Any) -> DeploymentState:
    """Make a Deployment whose pods all exist, are updated and ready."""
    state = DeploymentState(
        generation=1,
        observed_generation=1,
        requested_replicas=desired,
        replicas_managers=frozenset({names.FIELD_MANAGER}),
        config_hash="aaaaaaaa",
        pod_template=NEWEST.template,
        replicas=desired,
        updated_replicas=desired,
        ready_replicas=desired,
        available_replicas=desired,
        revision=1,
        conditions=ROLLED_OUT,
    )
    return replace(state, **changes)


def make_child(kind: str = "Deployment", name: str = "qwen-engine", **changes: Any) -> Child:
    child = Child(
        kind=kind,
        name=name,
        uid=f"uid-of-{name}",
        fingerprint="as-applied",
        labels=names.child_labels(OWNER.name),
        controller=f"{names.KIND}/{OWNER.name}",
        controller_group=names.GROUP,
        controller_uid=OWNER.uid,
    )
    return replace(child, **changes)


def make_observed(*children: Child, **changes: Any) -> Observed:
    found = children or (make_child(),)
    children = {(c.kind, c.name): c for c in found}
    return replace(Observed(children=children, replica_sets=(NEWEST,)), **changes)


def make_pod(name: str = "qwen-engine-1", *containers: ContainerState, **changes: Any) -> PodState:
    state = PodState(
        name=name,
        config_hash="aaaaaaaa",
        template_label=NEWEST.pods_label,
        phase="Running",
        containers=containers,
    )
    return replace(state, **changes)


def ended(
    message: str = "", code: int = 1, reason: str = "Error", name: str = "engine", **changes: Any
) -> ContainerState:
    state = ContainerState(
        name=name,
        image="example/engine:1",
        initial=name == "fetch",
        ended=True,
        exit_code=code,
        ended_reason=reason,
        ended_message=message,
        ended_at="2026-11-21T08:00:00Z",
    )
    return replace(state, **changes)
