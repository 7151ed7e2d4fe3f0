"""Tools for tests of the operator: a namespace of a real API server, and operators to start, stop and kill.

The operator is the real process in a thread with an event loop of its own. Fixtures: `conftest.py`.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from tests.operator.api_proxy import ApiProxy

from conveyor_api import names
from conveyor_operator.process import run_operator
from conveyor_operator.settings import Settings
from e2e.cluster.api import Api, ApiError, pauses

Json = dict[str, Any]
T = TypeVar("T")

COLLECTIONS = {
    "InferenceService": f"apis/{names.API_VERSION}/namespaces/{{}}/{names.PLURAL}",
    "Deployment": "apis/apps/v1/namespaces/{}/deployments",
    "ReplicaSet": "apis/apps/v1/namespaces/{}/replicasets",
    "HorizontalPodAutoscaler": "apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers",
    "PodDisruptionBudget": "apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "NetworkPolicy": "apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "Event": "api/v1/namespaces/{}/events",
    "EndpointSlice": "apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
    "Service": "api/v1/namespaces/{}/services",
    "ConfigMap": "api/v1/namespaces/{}/configmaps",
    "ServiceAccount": "api/v1/namespaces/{}/serviceaccounts",
    "PersistentVolumeClaim": "api/v1/namespaces/{}/persistentvolumeclaims",
    "Job": "apis/batch/v1/namespaces/{}/jobs",
    "Pod": "api/v1/namespaces/{}/pods",
    "Secret": "api/v1/namespaces/{}/secrets",
    "ResourceQuota": "api/v1/namespaces/{}/resourcequotas",
    "LimitRange": "api/v1/namespaces/{}/limitranges",
    "ScaledObject": "apis/keda.sh/v1alpha1/namespaces/{}/scaledobjects",  # where scaled_objects.py has installed them
    "Lease": "apis/coordination.k8s.io/v1/namespaces/{}/leases",
    "ServedName": f"apis/{names.API_VERSION}/namespaces/{{}}/{names.SERVED_NAME_PLURAL}",
    "Widget": "apis/tests.conveyor.dev/v1/namespaces/{}/widgets",  # loop/widget.py
}
CHILD_KINDS = (
    "Deployment", "Service", "ConfigMap", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget",
    "HorizontalPodAutoscaler", "PersistentVolumeClaim", "Job",
)  # fmt: skip


class Space:
    """A namespace. Tests read and write its objects by kind and name, as dictionaries."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    def path(self, kind: str, name: str = "", subresource: str = "") -> str:
        parts = ["", COLLECTIONS[kind].format(self.namespace), name, subresource]
        return "/".join(part for number, part in enumerate(parts) if part or number == 0)

    def get(self, kind: str, name: str) -> Json | None:
        try:
            return self.api.get(self.path(kind, name))
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def need(self, kind: str, name: str) -> Json:
        found = self.get(kind, name)
        assert found is not None, f"{kind} {name} is not there"
        return found

    def list(self, kind: str, selector: str = "") -> list[Json]:
        query = f"?labelSelector={selector}" if selector else ""
        return list(self.api.get(self.path(kind) + query)["items"])

    def create(self, kind: str, body: Json) -> Json:
        return self.api.create(self.path(kind), body)

    def apply(self, kind: str, body: Json) -> Json:
        return self.api.apply(self.path(kind, body["metadata"]["name"]), body)

    def patch(self, kind: str, name: str, patch: Json, subresource: str = "") -> Json:
        path = self.path(kind, name, subresource) + "?fieldManager=somebody"
        return self.api.call("PATCH", path, patch, "application/merge-patch+json")

    def delete(self, kind: str, name: str) -> None:
        self.api.delete(self.path(kind, name))

    def make_service(self, name: str = "qwen", **spec: Any) -> Json:
        return self.create("InferenceService", make_service(name, **spec))

    def edit(self, name: str, **spec: Any) -> Json:
        """Merge these members into the spec. None removes a member."""
        return self.patch("InferenceService", name, {"spec": spec})

    def condition(self, name: str, type: str) -> Json:
        status = self.need("InferenceService", name).get("status") or {}
        return next((c for c in status.get("conditions") or () if c["type"] == type), {})

    def wait_condition(self, name: str, type: str, status: str, reason: str, timeout: float = 120) -> Json:
        def found() -> Json | None:
            condition = self.condition(name, type)
            return condition if (condition.get("status"), condition.get("reason")) == (status, reason) else None

        return wait_until(f"{type}={status} {reason}", found, timeout, lambda: self.condition(name, type))

    def children(self, name: str) -> set[tuple[str, str]]:
        selector = f"{names.INFERENCE_SERVICE_LABEL}={name}"
        return {(kind, o["metadata"]["name"]) for kind in CHILD_KINDS for o in self.list(kind, selector)}

    def config_maps(self) -> set[str]:
        """Return the names of the ConfigMaps of the service `qwen`."""
        selector = f"{names.INFERENCE_SERVICE_LABEL}=qwen"
        return {o["metadata"]["name"] for o in self.list("ConfigMap", selector)}

    def wait_children(self, name: str, timeout: float = 120) -> set[tuple[str, str]]:
        """Wait until the Deployment exists, and the PodDisruptionBudget, which is applied after it."""
        last = f"{name}-engine"
        wait_until(
            f"children of {name}",
            lambda: self.get("PodDisruptionBudget", last) and self.get("Deployment", last),
            timeout,
            lambda: self.children(name),
        )
        return self.children(name)

    def wait_observed(self, name: str, timeout: float = 240) -> Json:
        """Wait until the status is for the current spec."""

        def found() -> Json | None:
            body = self.need("InferenceService", name)
            seen = (body.get("status") or {}).get("observedGeneration")
            return body if seen == body["metadata"]["generation"] else None

        return wait_until(f"{name} is observed", found, timeout)


class RunningOperator:
    """An operator that runs in a thread. `stop` has the effect of SIGTERM."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the operator as a signal would, and wait. Raises the error with which the operator ended."""
        self._call_soon(self._stop.set)
        self.wait_end(30)
        if self.error is not None:
            raise self.error

    def wait_end(self, timeout: float) -> BaseException | None:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the operator still runs"
        return self.error

    def _call_soon(self, what: Callable[[], Any]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what)

    async def _live(self) -> None:
        try:
            await run_operator(self._settings, self._stop)
        finally:
            await asyncio.sleep(0.1)  # aiohttp's closed connections need a moment of the loop to be gone

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # told to the test's thread
            self.error = error


def build_settings(space: Space, proxy: ApiProxy, folder: Path) -> Settings:
    """Return settings of an operator for only this namespace, which reaches the API server through the proxy."""
    return Settings(
        engine_image="example/engine:1",
        watch_namespaces=(space.namespace,),
        kubeconfig=str(proxy.write_kubeconfig(folder / "kubeconfig")),
        host="127.0.0.1",
        admin_port=0,
        metrics_api=False,
    )


class Stage:
    """A test's namespace, its proxy, and operators that it may start, stop and kill."""

    def __init__(self, space: Space, proxy: ApiProxy, settings: Settings) -> None:
        self.space = space
        self.proxy = proxy
        self.settings = settings
        self._lives: list[RunningOperator] = []

    def start(self, **changes: Any) -> RunningOperator:
        self.proxy.severed = False
        life = RunningOperator(replace(self.settings, **changes))
        self._lives.append(life)
        return life

    @contextmanager
    def operator(self, **changes: Any) -> Iterator[RunningOperator]:
        life = self.start(**changes)
        yield life
        life.stop()

    def kill(self, life: RunningOperator) -> None:
        """Cut the operator off from the API server and end it. What it does after that has no effect."""
        self.proxy.sever()
        with contextlib.suppress(Exception):
            life.stop()

    def close(self) -> None:
        for life in self._lives:
            self.kill(life)


def install_definition(api: Api, file: Path) -> None:
    """Install a CRD, and wait until the API server serves it."""
    body = yaml.safe_load(file.read_text())
    api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{body['metadata']['name']}", body)
    spec = body["spec"]
    paths = [f"/apis/{spec['group']}/{v['name']}/{spec['names']['plural']}" for v in spec["versions"] if v["served"]]
    wait_until(f"{spec['names']['plural']} are served", lambda: all(map(api.reachable, paths)))


def make_service(name: str = "qwen", **spec: Any) -> Json:
    """Build a valid InferenceService with these members of the spec."""
    body: Json = {"model": {"uri": "pvc://models/demo"}, "engine": {"device": "Auto", "maxModelLen": 512}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": body | spec,
    }


def wait_until(
    what: str, probe: Callable[[], T | None], timeout: float = 240, show: Callable[[], Any] = lambda: None
) -> T:
    deadline = time.monotonic() + timeout
    for pause in pauses():
        found = probe()
        if found:
            return found
        if time.monotonic() > deadline:
            break
        time.sleep(pause)
    raise TimeoutError(f"after {timeout:g} s still not: {what}; last seen: {show()!r}")
