"""Looks at everything anew: after Kopf had to list anew, and every now and then.

When a watch cannot be resumed (410), Kopf lists and tells what exists; of what was deleted meanwhile it says nothing.
So the operator then lists names and uids itself, and what is not there leaves the `store`. Kopf does not tell of a
list that is empty, which is why that is also done at the regular interval, the only calls of an idle operator.
Run by `process`; `handlers` tells of Kopf's lists.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from conveyor_api import names
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import ApiError
from conveyor_operator.kinds import INFERENCE_SERVICE, WATCHED
from conveyor_operator.store import Store
from conveyor_operator.workers import Key, backoff_seconds

logger = logging.getLogger(__name__)

_SETTLE_SECONDS = 1.0  # Kopf lists all kinds at about the same time, and has told by then what came before


class Resync:
    """`mark` is called with the keys that lost something, and at the interval with all; no `namespaces` are all."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        mark: Callable[[Key], None],
        namespaces: Sequence[str],
        interval_seconds: float,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._mark = mark
        self._namespaces = namespaces or (None,)
        self._interval_seconds = interval_seconds
        self._heard = asyncio.Event()

    def hear_list(self) -> None:
        """Kopf told of an object from a list, not from a watch."""
        self._heard.set()

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_seconds):
                    await self._heard.wait()
            await asyncio.sleep(backoff_seconds(failures) if failures else _SETTLE_SECONDS)
            regular = not self._heard.is_set()
            self._heard.clear()
            try:
                await self._forget_deleted()
                failures = 0
            except ApiError as error:
                failures += 1
                self._heard.set()
                logger.warning("resync failed status=%s error=%r", error.status, error.message)
            for key in self._store.services() if regular else ():
                self._mark(key)

    async def _forget_deleted(self) -> None:
        for kind in WATCHED:
            label = "" if kind is INFERENCE_SERVICE else names.INFERENCE_SERVICE_LABEL
            for namespace in self._namespaces:
                before = self._store.entries(kind, namespace)
                alive = await self._cluster.list_uids(kind, namespace, label)
                for key in self._store.forget(kind, before, alive):
                    logger.info("deleted unheard kind=%s key=%s/%s", kind.kind, *key)
                    self._mark(key)
