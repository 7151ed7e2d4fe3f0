"""Writes a resource's status and Events at the end of a reconcile.

Called by `reconcile`. Statuses are compared without their times, so that a new time alone causes no write.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import Refused
from conveyor_operator.kinds import EVENT, ObjectKind
from conveyor_operator.loop.child import ChildId
from conveyor_operator.loop.events import Event, build_event
from conveyor_operator.loop.owner import Object
from conveyor_operator.loop.steps import Memory

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 600.0  # minimum time between two Events about the same child


class Reporter:
    """Writes statuses and Events."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def write(self, kind: ObjectKind, body: Object, status: Object) -> Object | None:
        """Write the status of the resource `body` if it differs.

        Returns the written resource; None if nothing was written.
        """
        if is_same(status, body.get("status") or {}):
            return None
        try:
            return await self._cluster.replace_status(kind, body, status)
        except Refused as error:
            if error.status == 404:
                return None  # it was deleted meanwhile
            raise

    async def record_restored(self, body: Object, memory: Memory, child: ChildId, event: Event) -> None:
        """Create the Event about an undone edit of a child, at most once in ten minutes for each child."""
        now = time.monotonic()
        if now - memory.restored_reported.get(child, -_QUIET_SECONDS) >= _QUIET_SECONDS:
            memory.restored_reported[child] = now
            await self.record_events(body, [event])

    async def record_events(self, body: Object, found: Iterable[Event]) -> None:
        """Create a Kubernetes Event for each item.

        An Event that the API server refuses is only logged; without its namespace, nobody can read it.
        """
        for event in found:
            try:
                await self._cluster.create(EVENT, build_event(body, event, datetime.now(UTC)))
            except Refused as error:
                if error.is_of_leaving_namespace or error.status == 404:
                    return
                key = f"{body['metadata']['namespace']}/{body['metadata']['name']}"
                logger.warning("event=event_refused key=%s error=%s", key, error.message)


def is_same(status: Mapping[str, Any], previous: Mapping[str, Any]) -> bool:
    """Return whether both statuses are equal except for their times."""
    return _timeless(status) == _timeless(previous)


def _timeless(status: Mapping[str, Any]) -> dict[str, Any]:
    conditions = [
        {key: value for key, value in condition.items() if key != "lastTransitionTime"}
        for condition in status.get("conditions") or ()
    ]
    return {**status, "conditions": sorted(conditions, key=lambda c: str(c["type"]))}
