"""Deletes claims of names that never served, and marks those that did. Run by `keeper`.

The operator creates each claim with a mark, and removes the mark once a service of the namespace with this name is
Ready. A claim that still has its mark after some days is deleted, so trials and squatters do not keep names. A claim
without the mark never expires: a client must not reach another team's model while a service is away.
"""

import asyncio
import logging
import time
from typing import Final

from conveyor_api.names import UNSERVED_ANNOTATION
from conveyor_kube.served_names import Claim, NameIndex
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import ApiError
from conveyor_operator.kinds import SERVED_NAME

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 60.0
_START_SECONDS: Final = 600.0  # without deletions, until the status of services has been brought up to date
_MANAGER: Final = "conveyor-served-names"
_UNMARK: Final = {"metadata": {"annotations": {UNSERVED_ANNOTATION: None}}}


class Expiry:
    """The claims with a mark. after_seconds: their life; 0: they do not expire."""

    def __init__(self, cluster: Cluster, index: NameIndex, after_seconds: float) -> None:
        self._cluster, self._index, self._after_seconds = cluster, index, after_seconds
        self._ready: dict[str, tuple[str, str]] = {}  # namespace and name, by service
        self._changed = asyncio.Event()
        self.expired: set[str] = set()
        """The uids of claims that were deleted here. Another namespace may have the name first."""

    def see(self, service: str, name: str | None) -> None:
        """Note the name that the service `namespace/name` serves now; None if it is not Ready."""
        if name is None:
            self._ready.pop(service, None)
        elif self._ready.get(service) != (served := (service.partition("/")[0], name)):
            self._ready[service] = served
            self._changed.set()

    async def run(self) -> None:
        """Look at all claims each minute, and when a service becomes Ready, until cancelled."""
        may_delete_at = time.monotonic() + min(_START_SECONDS, self._after_seconds)
        while True:
            self._changed.clear()
            for claim in [claim for claim in self._index.claims.values() if claim.is_unserved]:
                try:
                    await self._judge(claim, time.monotonic() >= may_delete_at)
                except ApiError as error:
                    logger.warning("event=claim_not_changed name=%s error=%s", claim.name, error.message)
            try:
                async with asyncio.timeout(min(_LOOK_SECONDS, self._after_seconds or _LOOK_SECONDS)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _judge(self, claim: Claim, may_delete: bool) -> None:
        """Raises ApiError."""
        if (claim.namespace, claim.name) in self._ready.values():
            await self._cluster.merge(SERVED_NAME, claim.namespace, claim.object_name, _UNMARK, _MANAGER)
        elif may_delete and self._after_seconds and time.time() - claim.created_unix > self._after_seconds:
            logger.info("event=name_expired namespace=%s name=%s", claim.namespace, claim.name)
            self.expired.add(claim.uid)
            await self._cluster.delete(SERVED_NAME, claim.namespace, claim.object_name, claim.uid)
