"""Plays scheduler and kubelet on a control plane without nodes. It writes pods' statuses as the real ones would.

`Kubelet` gives every pod of a namespace the status that `decide` chooses for it, until told to stop; the functions
build statuses as seen on a real cluster.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.operator.stage import Space

from e2e.cluster.api import ApiError

Json = dict[str, Any]
Decide = Callable[[Json], Json | None]
TIME = "2026-11-21T08:00:00Z"


class Kubelet:
    """Use as a context manager; `decide` may be replaced on the way. None leaves a pod as it is.

    Without `addresses` no EndpointSlice names the pods, and nobody sends anything to them.
    """

    def __init__(self, space: Space, decide: Decide, *, addresses: bool = True) -> None:
        self._space = space
        self._has_addresses = addresses
        self.decide = decide
        self._node = f"node-{space.namespace}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._addresses = 0
        self._written: dict[str, Json] = {}  # by the pod's uid; the API server adds to what it is told

    def __enter__(self) -> "Kubelet":
        # EndpointSlices only name pods whose node exists.
        self._space.api.create("/api/v1/nodes", {"metadata": {"name": self._node}})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._space.api.delete(f"/api/v1/nodes/{self._node}")

    def _run(self) -> None:
        while not self._stop.is_set():
            for pod in self._space.list("Pod"):
                with contextlib.suppress(ApiError):  # it may be gone by now
                    self._play(pod)
            time.sleep(0.1)

    def _play(self, pod: Json) -> None:
        name = pod["metadata"]["name"]
        if "deletionTimestamp" in pod["metadata"]:
            self._space.api.delete(self._space.path("Pod", name) + "?gracePeriodSeconds=0")
            return
        status = self.decide(pod)
        if status is None:
            return
        if status["phase"] == "Running":
            if "nodeName" not in pod["spec"]:
                binding = {"metadata": {"name": name}, "target": {"kind": "Node", "name": self._node}}
                self._space.api.create(self._space.path("Pod", name, "binding"), binding)
            if self._has_addresses:
                address = pod["status"].get("podIP") or self._next_address()
                status = status | {"podIP": address, "podIPs": [{"ip": address}]}
        if self._written.get(pod["metadata"]["uid"]) != status:
            self._space.patch("Pod", name, {"status": status}, "status")
            self._written[pod["metadata"]["uid"]] = status

    def _next_address(self) -> str:
        self._addresses += 1
        return f"10.99.{self._addresses // 250}.{self._addresses % 250 + 1}"


def ready(pod: Json, found: str = "") -> Json:
    return running(pod, ready=True, found=found)


def running(pod: Json, *, ready: bool, found: str = "") -> Json:
    """Build a status: the model is fetched, with this termination message, and the engine runs."""
    return {
        "phase": "Running",
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": TIME},
            {"type": "Ready", "status": str(ready), "lastTransitionTime": TIME},
            {"type": "ContainersReady", "status": str(ready), "lastTransitionTime": TIME},
        ],
        "initContainerStatuses": [_container("fetch", terminated(0, "Completed", found), ready=True)],
        "containerStatuses": [_container("engine", {"running": {"startedAt": TIME}}, ready=ready)],
    }


def node_lost(pod: Json) -> Json:
    """Build the status of a pod that was ready, as the node's controller leaves it when the node stops reporting."""
    status = ready(pod)
    next(c for c in status["conditions"] if c["type"] == "Ready")["status"] = "False"
    return status


def fetch_failed(pod: Json, reason: str, message: str, container: str = "fetch") -> Json:
    """Build a status: the fetch ended with a termination message and will be retried."""
    message_text = json.dumps({"reason": reason, "message": message})
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
    return {
        "phase": "Pending",
        "initContainerStatuses": [_container(container, waiting, last=terminated(1, "Error", message_text))],
        "containerStatuses": [_container("engine", {"waiting": {"reason": "PodInitializing"}})],
    }


def prewarmed(pod: Json) -> Json:
    """Build a status: the Job has fetched the model."""
    return {"phase": "Succeeded", "containerStatuses": [_container("fetch", terminated(0, "Completed"))]}


def prewarming(pod: Json) -> Json:
    return {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": TIME}],
        "containerStatuses": [_container("fetch", {"running": {"startedAt": TIME}}, ready=True)],
    }


def prewarm_failed(pod: Json, reason: str, message: str) -> Json:
    """Build a status: the Job's fetch ended with a termination message and will be retried."""
    failed = fetch_failed(pod, reason, message)
    return {"phase": "Running", "containerStatuses": failed["initContainerStatuses"]}


def with_checks(decide: Decide, check: Decide | None = None) -> Decide:
    """Let `decide` choose for engines, and `check` for pods that only try an image; by default, these succeed."""

    def choose(pod: Json) -> Json | None:
        checks = pod["metadata"]["labels"]["conveyor.dev/inference-service"].endswith(".check")
        return (check or checked)(pod) if checks else decide(pod)

    return choose


def checked(pod: Json) -> Json:
    """Build a status: the Job has pulled the image and parsed the configuration."""
    return {"phase": "Succeeded", "containerStatuses": [_container("engine", terminated(0, "Completed"))]}


def check_failed(pod: Json) -> Json:
    """Build a status: the Job's image cannot be pulled."""
    image = pod["spec"]["containers"][0]["image"]
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}}
    return {"phase": "Pending", "containerStatuses": [_container("engine", waiting)]}


def oom_killed(pod: Json, message: str = "") -> Json:
    """Build a status: the engine was killed for memory.

    A message: the kernel killed only one process, as with cgroup v1.
    """
    return _engine_ended(pod, terminated(1 if message else 137, "OOMKilled", message))


def engine_failed(pod: Json, reason: str, message: str) -> Json:
    """Build a status: the engine ended with a termination message and will be restarted."""
    return _engine_ended(pod, terminated(2, "Error", json.dumps({"reason": reason, "message": message})))


def crashed(pod: Json, code: int, last_lines: str) -> Json:
    """Build a status: the engine ended without a message, so the kubelet used the last lines of its log."""
    return _engine_ended(pod, terminated(code, "Error", last_lines))


def _engine_ended(pod: Json, ended: Json) -> Json:
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
    return running(pod, ready=False) | {"containerStatuses": [_container("engine", waiting, last=ended)]}


def cannot_start(pod: Json, container: str, message: str) -> Json:
    """Build a status: the kubelet cannot create a container, because an object that it names is missing."""
    waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": message}}
    if container == "engine":
        return running(pod, ready=False) | {"containerStatuses": [_container("engine", waiting)]}
    return {
        "phase": "Pending",
        "initContainerStatuses": [_container(container, waiting)],
        "containerStatuses": [_container("engine", {"waiting": {"reason": "PodInitializing"}})],
    }


def unschedulable(pod: Json, message: str = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.") -> Json:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition | {"lastTransitionTime": TIME}]}


def image_pull_failed(pod: Json) -> Json:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "example/engine:1"'}}
    return {
        "phase": "Pending",
        "initContainerStatuses": [_container("fetch", waiting)],
        "containerStatuses": [_container("engine", {"waiting": {"reason": "PodInitializing"}})],
    }


def terminated(code: int, reason: str, message: str = "") -> Json:
    ended = {"exitCode": code, "reason": reason, "startedAt": TIME, "finishedAt": TIME}
    return {"terminated": ended | ({"message": message} if message else {})}


def _container(name: str, state: Json, *, ready: bool = False, last: Json | None = None) -> Json:
    return {
        "name": name, "image": "example/engine:1", "imageID": "", "ready": ready, "started": ready,
        "restartCount": 1 if last else 0, "state": state, "lastState": last or {},
    }  # fmt: skip
