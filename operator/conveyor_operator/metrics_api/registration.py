"""Decides when the metrics server is registered as custom.metrics.k8s.io, and builds its two APIServices. No I/O.

The group must have one owner, because the HPA uses the version that the API server prefers, whoever serves it. So
Conveyor registers both versions or none, and only while nobody else has one. It registers only a server that responds,
because an APIService without a server blocks the deletion of every namespace. Reasons: docs/adr/0005. Used by `keeper`
and `registrar`. The caller passes the time.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from conveyor_api import names
from conveyor_operator.kinds import API_SERVICE, CLUSTER_ROLE
from conveyor_operator.metrics_api.server import find_port

Object = dict[str, Any]

API_SERVICES = tuple(f"{version}.{names.METRICS_GROUP}" for version in names.METRICS_VERSIONS)

SETTLE = timedelta(seconds=30)
"""How long the group is left free after an APIService was removed: a new owner may be about to create its own."""
PATIENCE = timedelta(seconds=60)
"""How long the API server may report Conveyor's APIServices as unavailable before they are withdrawn."""
_FIRST_RETRY, _LAST_RETRY = timedelta(minutes=1), timedelta(minutes=30)
_LABELS = {names.MANAGED_BY_LABEL: "conveyor", names.PART_OF_LABEL: "conveyor"}


@dataclass(frozen=True, slots=True)
class Seen:
    """The objects that the watches have reported; None if one does not exist. `namespace`: the metrics server's."""

    namespace: str
    api_services: Mapping[str, Object | None]
    deployment: Object | None
    namespace_object: Object | None

    @property
    def ours(self) -> dict[str, Object]:
        return {name: found for name, found in self._present() if is_ours(found, self.namespace)}

    @property
    def foreign(self) -> dict[str, Object]:
        return {name: found for name, found in self._present() if not is_ours(found, self.namespace)}

    def _present(self) -> list[tuple[str, Object]]:
        return [(name, found) for name, found in self.api_services.items() if found is not None]


@dataclass(frozen=True, slots=True)
class Register:
    """The plan to create or update both APIServices, and to check again at `until`."""

    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The plan to delete Conveyor's APIServices."""

    why: str


@dataclass(frozen=True, slots=True)
class Wait:
    """The plan to leave the group alone, and to check again at `until`."""

    why: str
    until: datetime | None = None


class Registration:
    """Makes the decisions, and remembers since when the relevant states have lasted."""

    def __init__(self) -> None:
        self._free_since: datetime | None = None
        self._unavailable_since: datetime | None = None
        self._was_available = False
        self._failures = 0  # consecutive registrations that the API server could not use
        self._retry_at: datetime | None = None

    def record_loss(self, now: datetime) -> None:
        """Record that somebody else has deleted an APIService of the group."""
        self._free_since = now

    def plan(self, seen: Seen, now: datetime) -> Register | Withdraw | Wait:
        why = _why_never(seen)
        if seen.ours:
            if not why and len(seen.ours) < len(API_SERVICES):
                why = "one of the two APIServices was deleted"
            return Withdraw(why) if why else self._plan_registered(seen, now)
        self._unavailable_since, self._was_available = None, False
        return Wait(why) if why else self._plan_unregistered(seen, now)

    def _plan_registered(self, seen: Seen, now: datetime) -> Register | Withdraw:
        fault = find_fault(seen.ours)
        if not fault:
            self._unavailable_since, self._was_available, self._failures, self._retry_at = None, True, 0, None
            return Register()
        self._unavailable_since = self._unavailable_since or now
        until = self._unavailable_since + PATIENCE
        if now < until:
            return Register(until)
        if not self._was_available:
            self._failures += 1
            self._retry_at = now + min(_FIRST_RETRY * 2 ** min(self._failures - 1, 10), _LAST_RETRY)
        return Withdraw(f"the API server reports it unavailable: {fault}")

    def _plan_unregistered(self, seen: Seen, now: datetime) -> Register | Wait:
        if not _available_replicas(seen.deployment):
            self._retry_at = None  # the missing pod is the cause, so no pause is needed once a pod is available
            return Wait(f"Deployment {names.METRICS_SERVICE} has no available pod")
        if self._free_since is not None and now < self._free_since + SETTLE:
            return Wait(
                "its APIService was deleted less than 30 s ago; waiting for another owner", self._free_since + SETTLE
            )
        if self._retry_at is not None and now < self._retry_at:
            return Wait(f"the API server could not reach Service {names.METRICS_SERVICE}; retrying", self._retry_at)
        return Register()


def _why_never(seen: Seen) -> str:
    """Return why the API must not be registered at all; "" if it may."""
    if seen.foreign:
        return f"{next(iter(seen.foreign))} belongs to {describe_owner(next(iter(seen.foreign.values())))}"
    if seen.deployment is None or "deletionTimestamp" in seen.deployment["metadata"]:
        return f"there is no Deployment {names.METRICS_SERVICE}"
    if seen.namespace_object is None or "deletionTimestamp" in seen.namespace_object["metadata"]:
        return f"namespace {seen.namespace} is being deleted"
    return ""


def _available_replicas(deployment: Object | None) -> int:
    return int(((deployment or {}).get("status") or {}).get("availableReplicas") or 0)


def is_ours(api_service: Object, namespace: str) -> bool:
    service = api_service["spec"].get("service") or {}
    return (service.get("namespace"), service.get("name")) == (namespace, names.METRICS_SERVICE)


def describe_owner(api_service: Object) -> str:
    service = api_service["spec"].get("service")
    return f"{service['namespace']}/{service['name']}" if service else "the API server itself"


def find_fault(api_services: Mapping[str, Object]) -> str:
    """Return the API server's message about the first APIService that is not Available; "" if all are."""
    for name, found in api_services.items():
        conditions = (found.get("status") or {}).get("conditions") or ()
        available = next((c for c in conditions if c["type"] == "Available"), None)
        if available is None:
            return f"the API server has not checked {name} yet"
        if available["status"] != "True":
            return f"{available.get('reason', '')}: {available.get('message', '')}"
    return ""


def build_api_service(name: str, service: Object, bundle: bytes, role: Object) -> Object:
    """Build an APIService.

    The chart's ClusterRole `role` owns it, so the garbage collector deletes it with the chart.
    """
    version, _, group = name.partition(".")
    owner = {
        "apiVersion": CLUSTER_ROLE.api_version,
        "kind": CLUSTER_ROLE.kind,
        "name": role["metadata"]["name"],
        "uid": role["metadata"]["uid"],
    }
    metadata = service["metadata"]
    where = {"namespace": metadata["namespace"], "name": metadata["name"], "port": find_port(service)}
    return {
        "apiVersion": API_SERVICE.api_version,
        "kind": API_SERVICE.kind,
        "metadata": {"name": name, "labels": _LABELS, "ownerReferences": [owner]},
        "spec": {
            "group": group,
            "version": version,
            "groupPriorityMinimum": 100,
            "versionPriority": 200 - 100 * names.METRICS_VERSIONS.index(version),
            "caBundle": base64.b64encode(bundle).decode(),
            "service": where,
        },
    }


def differs(found: Object, wanted: Object) -> bool:
    """Return whether Conveyor's APIService differs from the wanted one. Fields that others have added are ignored."""
    owner = wanted["metadata"]["ownerReferences"][0]["uid"]
    owners = [reference["uid"] for reference in found["metadata"].get("ownerReferences") or ()]
    return owner not in owners or any(found["spec"].get(key) != value for key, value in wanted["spec"].items())


def build_release(found: Object) -> Object | None:
    """Return a patch that removes Conveyor's owner reference and labels from another owner's APIService, or None.

    None means that the APIService has no such reference. With the reference, uninstalling Conveyor would delete it.
    """
    owners = found["metadata"].get("ownerReferences") or []
    left = [owner for owner in owners if (owner["kind"], owner["name"]) != (CLUSTER_ROLE.kind, names.METRICS_API_ROLE)]
    if left == owners:
        return None
    metadata = {"resourceVersion": found["metadata"]["resourceVersion"], "ownerReferences": left}
    return {"metadata": metadata | {"labels": dict.fromkeys(_LABELS)}}
