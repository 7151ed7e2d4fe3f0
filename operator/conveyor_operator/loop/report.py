"""What people read of one InferenceService: its status and its Events, written when something happened.

Called by `reconcile`. What it remembers is which hand edits it has told of lately; that is not needed to be right.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from conveyor_api import names
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import Refused
from conveyor_operator.inferenceservice.events import News, build_event, find_news, restored
from conveyor_operator.inferenceservice.kinds import INFERENCE_SERVICE
from conveyor_operator.inferenceservice.manifests import Object
from conveyor_operator.inferenceservice.status import is_same
from conveyor_operator.kinds import EVENT

logger = logging.getLogger(__name__)

_QUIET_SECONDS = 600.0  # somebody who edits the same child again and again is told so this often


@dataclass(slots=True)
class Reported:
    """What was told of one InferenceService, as long as it has this uid."""

    restored: dict[tuple[str, str], float] = field(default_factory=dict)
    """When (monotonic) a child was last said to be restored."""


class Reporter:
    """Writes statuses and Events."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def write(self, body: Object, status: Object) -> None:
        """If it says something new: the status, then an Event for each thing that happened."""
        previous, metadata = body.get("status") or {}, body["metadata"]
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
            await self._cluster.apply(INFERENCE_SERVICE, patch, names.FIELD_MANAGER, subresource="status")
        except Refused as error:
            if error.status == 404:
                return  # it was deleted meanwhile
            raise
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
