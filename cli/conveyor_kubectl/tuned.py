"""The InferenceService that `tune` changes: the live one, or a copy of it with one engine. Used by `tuning`.

An annotation of the live service stores the original fields, and a label marks the copy. So `--restore` can restore the
service, or delete the copy, after a `tune` was killed.
"""

import asyncio
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from conveyor_api import names
from conveyor_api.conditions import LASTING_FAILURES, ConditionType, Reason
from conveyor_api.errors import InvalidResource
from conveyor_api.resource import InferenceService
from conveyor_insight.facts import Unanswered
from conveyor_insight.tuning.candidates import Candidate, Plan
from conveyor_insight.tuning.interruption import in_thread
from conveyor_insight.tuning.sweep import CannotRun
from conveyor_kubectl.cluster import Cluster, Refused
from conveyor_load.requests import Target
from conveyor_operator.inferenceservice.kinds import INFERENCE_SERVICE

_SUFFIX: Final = "-tune"
_TRIES: Final = 20
_LOOK_SECONDS: Final = 1.0
_RESTORE_SECONDS: Final = 60
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Gateway:
    """The address of the gateway. `build_headers` returns the headers of a request, such as `Authorization`."""

    url: str
    build_headers: Callable[[], dict[str, str]] = dict


def copy_name(name: str) -> str:
    """Return the name of the copy of a service."""
    return f"{name[: names.MAX_SERVICE_NAME_LENGTH - len(_SUFFIX)].rstrip('-')}{_SUFFIX}"


def read_service(cluster: Cluster, namespace: str, name: str) -> tuple[InferenceService, Body]:
    """Read the service. Return the parsed service and its body. Raises Unanswered."""
    body = cluster.find(INFERENCE_SERVICE.path(namespace, name))
    if body is None:
        raise Unanswered(f"there is no InferenceService {name} in namespace {namespace}")
    try:
        return InferenceService.parse(body), dict(body)
    except InvalidResource as error:
        raise Unanswered(f"InferenceService {name} is invalid: {error}") from error


def _edit(cluster: Cluster, path: str, change: Callable[[Body], bool]) -> Body | None:
    """Change the newest version of an object and write it. Returns None if nothing changed. Raises Unanswered."""
    for _ in range(_TRIES):
        body = copy.deepcopy(dict(cluster.get(path)))
        if not change(body):
            return None
        try:
            return dict(cluster.replace(path, body))
        except Refused as error:
            if error.status != 409:
                raise
            time.sleep(0.1)
    raise Unanswered(f"{path} changes all the time: it could not be written")


class TunedService:
    """A service whose `spec.batching` is set to each candidate. Use it in `async with`, which restores the service."""

    def __init__(
        self,
        cluster: Cluster,
        body: Body,
        plan: Plan,
        gateway: Gateway,
        start_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        """body: the service as it was read before any change."""
        self._cluster, self._original, self._plan = cluster, body, plan
        self._gateway, self._start_seconds, self._say = gateway, start_seconds, say
        self._namespace: str = body["metadata"]["namespace"]
        self._name: str = body["metadata"]["name"]
        self._model = InferenceService.parse(body).served_model_name
        self._written: Body | None = body["spec"].get("batching")

    @property
    def name(self) -> str:
        """The name of the service whose engines are measured."""
        return self._name

    @property
    def _path(self) -> str:
        return INFERENCE_SERVICE.path(self._namespace, self.name)

    async def __aenter__(self) -> "TunedService":
        if names.TUNE_ANNOTATION in (self._original["metadata"].get("annotations") or {}):
            raise Unanswered(
                f"{self._name} is being tuned, or was when that tune was killed. "
                f"`kubectl conveyor tune {self._name} --restore` puts it back"
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        await in_thread(self._restore)

    async def apply(self, candidate: Candidate) -> Target:
        """Apply a candidate and wait until its engines are ready. Raises CannotRun, and Unanswered to end the sweep."""
        batching = {**(self._original["spec"].get("batching") or {}), **self._plan.build_fields(candidate)}
        generation = await in_thread(self._write, batching)
        service = await self._wait_ready(generation)
        url = f"{self._gateway.url}/{self._namespace}/{self.name}"
        return Target(url, self._model, service.task or "Generate", await in_thread(self._gateway.build_headers))

    def _write(self, batching: Body) -> int:
        """Write `spec.batching`. Return the generation to wait for."""

        def change(body: Body) -> bool:
            self._check_ours(body)
            if (body["spec"].get("batching") or {}) == batching:
                return False
            body["spec"]["batching"] = batching
            self._mark(body)
            return True

        try:
            written = _edit(self._cluster, self._path, change)
        except Refused as error:
            if error.status == 422:
                raise CannotRun(str(error)) from error
            raise
        if written is None:
            written = dict(self._cluster.get(self._path))
        self._written = written["spec"].get("batching")
        return int(written["metadata"]["generation"])

    def _check_ours(self, body: Body) -> None:
        if body["spec"].get("batching") != self._written:
            raise Unanswered(f"somebody else changed spec.batching of {self.name}: it is left as it is now")

    def _mark(self, body: Body) -> None:
        original = {"batching": self._original["spec"].get("batching")}
        body["metadata"].setdefault("annotations", {})[names.TUNE_ANNOTATION] = json.dumps(original)

    async def _wait_ready(self, generation: int) -> InferenceService:
        end = time.monotonic() + self._start_seconds
        while time.monotonic() < end:
            service, _ = await in_thread(read_service, self._cluster, self._namespace, self.name)
            if (service.status.observed_generation or 0) >= generation and _is_ready(service):
                return service
            await asyncio.sleep(_LOOK_SECONDS)
        raise CannotRun(f"not ready after {self._start_seconds:.0f} s")

    def _restore(self) -> None:
        """Restore the service. Retry for a minute, then raise Unanswered with the command that restores it."""
        end = time.monotonic() + _RESTORE_SECONDS
        while True:
            try:
                self._put_back()
            except Unanswered as error:
                if time.monotonic() > end:
                    raise Unanswered(
                        f"{error}. {self._name} is not put back: run `kubectl conveyor tune {self._name} "
                        f"-n {self._namespace} --restore`"
                    ) from error
                time.sleep(1)
            else:
                return

    def _put_back(self) -> None:
        def change(body: Body) -> bool:
            is_ours = body["spec"].get("batching") == self._written
            if not is_ours:
                self._say(f"somebody else changed spec.batching of {self.name}: it is left as it is now")
            return _unmark(body, restore=is_ours)

        if _edit(self._cluster, self._path, change) is not None:
            self._say(f"spec.batching of {self.name} is as it was")
            self._return_fields()

    def _return_fields(self) -> None:
        """Return fields to the managers that owned them, so that their next server-side apply has no conflict."""
        managers = [entry for entry in self._original["metadata"].get("managedFields") or () if _is_of_spec(entry)]

        def change(body: Body) -> bool:
            others = [entry for entry in body["metadata"].get("managedFields") or () if not _is_of_spec(entry)]
            body["metadata"]["managedFields"] = managers + others
            return bool(managers)

        _edit(self._cluster, self._path, change)


def _is_of_spec(entry: Body) -> bool:
    return "subresource" not in entry


def _unmark(body: Body, *, restore: bool = True) -> bool:
    """Remove the annotation. If `restore` is set, also restore the fields that the annotation contains.

    Returns False if there is no annotation. Raises Unanswered.
    """
    annotations = body["metadata"].get("annotations") or {}
    if names.TUNE_ANNOTATION not in annotations:
        return False
    try:
        batching = json.loads(annotations.pop(names.TUNE_ANNOTATION))["batching"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Unanswered(f"the annotation {names.TUNE_ANNOTATION} is unreadable: {error!r}") from error
    if restore and batching is None:
        body["spec"].pop("batching", None)
    elif restore:
        body["spec"]["batching"] = batching
    return True


def _is_ready(service: InferenceService) -> bool:
    """Return whether all engines run the current spec. Raises CannotRun for a lasting failure."""
    status = service.status
    for condition in status.conditions:
        if condition.status != "True" and condition.reason in LASTING_FAILURES | {
            Reason.INVALID_SPEC,
            Reason.ROLLED_BACK,
        }:
            raise CannotRun(f"{condition.reason}: {status.find_message(condition)}")
    reasons = {condition.type: condition.reason for condition in status.conditions}
    wanted = status.desired_replicas or 0
    return (
        reasons.get(ConditionType.PROGRESSING) == Reason.UP_TO_DATE
        and reasons.get(ConditionType.WORKLOAD_READY) == Reason.REPLICAS_READY
        and wanted > 0
        and (status.ready_replicas, status.updated_replicas) == (wanted, wanted)
    )


class TunedCopy(TunedService):
    """A copy of the service with one engine. It is deleted at the end of `async with`, or with the original service."""

    @property
    def name(self) -> str:
        return copy_name(self._name)

    async def __aenter__(self) -> "TunedCopy":
        created: list[Body] = []
        try:
            await in_thread(self._create, created)
        except Refused as error:
            if error.status == 409:
                raise Unanswered(
                    f"there is a copy {self.name} already. If no other tune runs, "
                    f"`kubectl conveyor tune {self._name} --restore` deletes it"
                ) from error
            raise
        except asyncio.CancelledError:
            if created:
                await in_thread(self._restore)
            raise
        self._written = created[0]["spec"].get("batching")
        return self

    def _create(self, created: list[Body]) -> None:
        created.append(dict(self._cluster.create(INFERENCE_SERVICE.path(self._namespace), self._build())))

    def _build(self) -> Body:
        metadata, spec = self._original["metadata"], copy.deepcopy(self._original["spec"])
        spec.pop("autoscaling", None)
        spec["model"]["name"] = self._model  # so that requests can name the same model
        # An old engine is removed before the new one starts, so one GPU is enough.
        spec |= {"replicas": 1, "listed": False, "rollout": {"maxSurge": 0, "maxUnavailable": 1}}
        owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": self._name, "uid": metadata["uid"]}
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {
                "name": self.name,
                "namespace": self._namespace,
                "labels": {names.TUNE_LABEL: self._name},
                "ownerReferences": [owner],
            },
            "spec": spec,
        }

    def _mark(self, body: Body) -> None:
        """Do nothing: the copy is marked by its label."""

    def _put_back(self) -> None:
        self._cluster.delete(self._path)
        self._say(f"the copy {self.name} is deleted")


def restore(cluster: Cluster, namespace: str, name: str) -> list[str]:
    """Undo the changes that a killed `tune` left behind. Return a sentence for each. Raises Unanswered."""
    sentences = []
    if _edit(cluster, INFERENCE_SERVICE.path(namespace, name), _unmark) is not None:
        sentences.append(f"spec.batching of {name} is as it was")
    left = cluster.find(INFERENCE_SERVICE.path(namespace, copy_name(name)))
    if left is not None and (left["metadata"].get("labels") or {}).get(names.TUNE_LABEL) == name:
        cluster.delete(INFERENCE_SERVICE.path(namespace, copy_name(name)))
        sentences.append(f"the copy {copy_name(name)} is deleted")
    return sentences or [f"there is nothing to put back for {name}"]
