"""What is known of the cluster, read by key.

`watches` puts in what the API server tells, as `observed` makes it; `reconcile` reads. Objects are told apart by uid:
for a moment there may be two of one name, of which the later known one counts.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from conveyor_api import names
from conveyor_operator.inferenceservice.kinds import CHILDREN, INFERENCE_SERVICE
from conveyor_operator.inferenceservice.observed import AutoscalerState, Child, DeploymentState, Observed
from conveyor_operator.inferenceservice.pods import PodState
from conveyor_operator.kinds import AUTOSCALER, DEPLOYMENT, ENDPOINT_SLICE, POD, Kind
from conveyor_operator.loop.workers import Key


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One object as it was told last, and the InferenceService that it belongs to."""

    key: Key
    value: Any


class Store:
    """Every object by kind and uid, and the same by key, in the order in which they became known."""

    def __init__(self) -> None:
        self._objects: defaultdict[Kind, dict[str, Entry]] = defaultdict(dict)
        self._by_key: defaultdict[Kind, dict[Key, dict[str, Entry]]] = defaultdict(dict)

    def put(self, kind: Kind, uid: str, key: Key, value: Any) -> Key | None:
        """The object is there, with this value; a former one is replaced. Returns that one's key if it was another."""
        former = self._objects[kind].get(uid)
        left = former.key if former is not None and former.key != key else None
        if left is not None:
            self.drop(kind, uid)
        entry = Entry(key, value)
        self._objects[kind][uid] = entry
        self._by_key[kind].setdefault(key, {})[uid] = entry
        return left

    def drop(self, kind: Kind, uid: str) -> None:
        """The object is gone, if it was known."""
        entry = self._objects[kind].pop(uid, None)
        if entry is None:
            return
        of_key = self._by_key[kind][entry.key]
        del of_key[uid]
        if not of_key:
            del self._by_key[kind][entry.key]

    def keys(self, kind: Kind, namespace: str | None) -> dict[str, Key]:
        """The keys of all objects of a kind by uid, in one namespace or in all."""
        return {uid: entry.key for uid, entry in self._objects[kind].items() if namespace in (None, entry.key[0])}

    def services(self) -> list[Key]:
        """All InferenceServices."""
        return list(self._by_key[INFERENCE_SERVICE])

    def uid(self, key: Key) -> str | None:
        """The InferenceService's uid, None if there is none."""
        return next(reversed(self._values(INFERENCE_SERVICE, key)), None)

    def observe(self, key: Key) -> Observed:
        """Everything that is labelled as belonging to this InferenceService."""
        children: dict[tuple[str, str], Child] = {}
        states: dict[Kind, Any] = {}
        for kind in CHILDREN:
            for child, state in self._values(kind, key):
                children[child.kind, child.name] = child
                if child.name == names.engine_name(key[1]):  # not a copy that somebody made with our label
                    states[kind] = state
        deployment: DeploymentState | None = states.get(DEPLOYMENT)
        autoscaler: AutoscalerState | None = states.get(AUTOSCALER)
        pods: list[PodState] = sorted(self._values(POD, key), key=lambda pod: pod.name)
        ready_endpoints = sum(self._values(ENDPOINT_SLICE, key))
        return Observed(children, deployment, autoscaler, tuple(pods), ready_endpoints)

    def _values(self, kind: Kind, key: Key) -> list[Any]:
        return [entry.value for entry in self._by_key[kind].get(key, {}).values()]
