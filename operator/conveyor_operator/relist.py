"""Finds what was deleted while no watch told: after each list of Kopf's.

When a watch cannot be resumed (410), Kopf lists and tells what exists; of what was deleted meanwhile it says nothing.
So the operator then lists names and uids of that kind itself, and what is not there leaves the `store`. Run by
`process`; `session` tells of Kopf's lists.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from conveyor_api import names
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import ApiError
from conveyor_operator.kinds import INFERENCE_SERVICE, Kind
from conveyor_operator.store import Store
from conveyor_operator.workers import Key, backoff_seconds

logger = logging.getLogger(__name__)

_SETTLE_SECONDS = 1.0  # by then Kopf has told what came before its list


class Relist:
    """`mark` is called with the keys that lost something; no `namespaces` are all."""

    def __init__(self, cluster: Cluster, store: Store, mark: Callable[[Key], None], namespaces: Sequence[str]) -> None:
        self._cluster = cluster
        self._store = store
        self._mark = mark
        self._namespaces = namespaces or (None,)
        self._listed: set[Kind] = set()
        self._heard = asyncio.Event()

    def hear_list(self, kind: Kind) -> None:
        """Kopf has listed this kind."""
        self._listed.add(kind)
        self._heard.set()

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            await self._heard.wait()
            await asyncio.sleep(backoff_seconds(failures) if failures else _SETTLE_SECONDS)
            self._heard.clear()
            kinds, self._listed = self._listed, set()
            failed = [kind for kind in kinds if not await self._forget_deleted(kind)]
            for kind in failed:
                self.hear_list(kind)
            failures = failures + 1 if failed else 0

    async def _forget_deleted(self, kind: Kind) -> bool:
        """Whether it was possible."""
        label = "" if kind is INFERENCE_SERVICE else names.INFERENCE_SERVICE_LABEL
        for namespace in self._namespaces:
            before = self._store.entries(kind, namespace)
            try:
                alive = await self._cluster.list_uids(kind, namespace, label)
            except ApiError as error:
                logger.warning("relist failed kind=%s status=%s error=%r", kind.kind, error.status, error.message)
                return False
            for key in self._store.forget(kind, before, alive):
                logger.info("deleted unheard kind=%s key=%s/%s", kind.kind, *key)
                self._mark(key)
        return True
