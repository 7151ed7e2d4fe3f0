"""What is known of the cluster, read by key: a view on Kopf's indexes.

`handlers` makes the indexes and binds them here at start-up; `reconcile` reads. The values in the indexes are what
`observed` makes of the objects, so this module only collects them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from conveyor_api import names
from conveyor_operator.kinds import AUTOSCALER, CHILDREN, DEPLOYMENT, ENDPOINT_SLICE, INFERENCE_SERVICE, POD, Kind
from conveyor_operator.observed import AutoscalerState, Child, DeploymentState, Observed
from conveyor_operator.pods import PodState
from conveyor_operator.workers import Key

Index = Mapping[Key, Iterable[Any]]


class Store:
    """Empty until `bind`. Every index maps (namespace, InferenceService) to the values of its objects."""

    def __init__(self) -> None:
        self._indexes: dict[Kind, Index] = {}

    def bind(self, indexes: Mapping[Kind, Index]) -> None:
        self._indexes = dict(indexes)

    def services(self) -> list[Key]:
        """All InferenceServices."""
        return list(self._indexes.get(INFERENCE_SERVICE, {}))

    def resource(self, key: Key) -> dict[str, Any] | None:
        """The InferenceService's body, as the API server sent it last."""
        return next(iter(self._values(INFERENCE_SERVICE, key)), None)

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
        index = self._indexes.get(kind, {})
        return list(index[key]) if key in index else []
