"""What is known of the cluster, read by key.

`handlers` puts in what Kopf tells, as `observed` makes it; `relist` takes out what Kopf could not tell; `reconcile`
reads. Objects are told apart by uid: for a moment there may be two of one name, of which the later known one counts.
"""

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from conveyor_api import names
from conveyor_operator.kinds import AUTOSCALER, CHILDREN, DEPLOYMENT, ENDPOINT_SLICE, INFERENCE_SERVICE, POD, Kind
from conveyor_operator.observed import AutoscalerState, Child, DeploymentState, Observed
from conveyor_operator.pods import PodState
from conveyor_operator.workers import Key


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

    def entries(self, kind: Kind, namespace: str | None) -> dict[str, Entry]:
        """All that is known of a kind by uid, in one namespace or in all."""
        return {uid: e for uid, e in self._objects[kind].items() if namespace in (None, e.key[0])}

    def forget(self, kind: Kind, before: Mapping[str, Entry], alive: Set[str]) -> set[Key]:
        """Drops what was known `before` a list that shows only `alive`, unless it was told since; returns its keys."""
        gone = {u: e for u, e in before.items() if u not in alive and self._objects[kind].get(u) is e}
        for uid in gone:
            self.drop(kind, uid)
        return {entry.key for entry in gone.values()}

    def services(self) -> list[Key]:
        """All InferenceServices."""
        return list(self._by_key[INFERENCE_SERVICE])

    def resource(self, key: Key) -> dict[str, Any] | None:
        """The InferenceService's body, as the API server sent it last."""
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
