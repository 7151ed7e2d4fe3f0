"""What people read of one InferenceService: its status and its Events, written when something happened.

Called by `reconcile`. What it remembers is the status that it wrote last, until the watch has brought it back, and
which hand edits it has told of lately; nothing of it is needed to be right.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from conveyor_api import names
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import Refused
from conveyor_operator.events import News, build_event, find_news, restored
from conveyor_operator.kinds import EVENT, INFERENCE_SERVICE
from conveyor_operator.manifests import Object
from conveyor_operator.status import is_same

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 600.0  # somebody who edits the same child again and again is told so this often


@dataclass(slots=True)
class Reported:
    """What was told of one InferenceService, as long as it has this uid."""

    status: Object | None = None
    """Written while the resource had `version`, so newer than what the store says at that version."""
    version: str = ""
    restored: dict[tuple[str, str], float] = field(default_factory=dict)
    """When (monotonic) a child was last said to be restored."""

    def previous(self, body: Object) -> Object:
        """The status that is there: our last one, if the watch has not brought it back yet."""
        if self.status is not None and self.version == body["metadata"]["resourceVersion"]:
            return self.status
        found: dict[str, Any] = body.get("status") or {}
        return found


class Reporter:
    """Writes statuses and Events."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def write(self, body: Object, reported: Reported, status: Object) -> None:
        """If it says something new: the status, then an Event for each thing that happened."""
        previous, metadata = reported.previous(body), body["metadata"]
        if is_same(status, previous):
            return
        patch = {
            "apiVersion": INFERENCE_SERVICE.api_version,
            "kind": INFERENCE_SERVICE.kind,
            # The uid makes it fail on another resource that has come under this name.
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]},
            "status": status,
        }
        try:
            written = await self._cluster.apply(INFERENCE_SERVICE, patch, names.FIELD_MANAGER, subresource="status")
        except Refused as error:
            if error.status == 404:
                return  # it was deleted meanwhile
            raise
        reported.status, reported.version = written.get("status") or {}, metadata["resourceVersion"]
        await self.tell(body, find_news(previous, status))

    async def tell_restored(self, body: Object, reported: Reported, child: tuple[str, str], deleted: bool) -> None:
        """That a hand edit of a child was undone: once, however often the same child is edited in a while."""
        now = time.monotonic()
        if now - reported.restored.get(child, -_QUIET_SECONDS) >= _QUIET_SECONDS:
            reported.restored[child] = now
            await self.tell(body, [restored(*child, deleted)])

    async def tell(self, body: Object, found: Iterable[News]) -> None:
        for news in found:
            try:
                await self._cluster.create(EVENT, build_event(body, news, datetime.now(UTC)))
            except Refused as error:
                key = f"{body['metadata']['namespace']}/{body['metadata']['name']}"
                logger.warning("event refused key=%s error=%r", key, error.message)
