"""Claims the served names of services for their namespaces, and reports the owner of each name.

Runs next to Kopf as one task, started by `process`. A claim is a ServedName in the namespace that holds the name. It
outlives the service, and is deleted with the namespace, by a user, or if the name never served (`expiry`). A free name
goes to the first service that wants it. If several already want it, the oldest service gets it. Only one claim is
created at a time, so that no namespace exceeds its limit.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from conveyor_api.names import API_VERSION, MAX_SERVED_NAMES, SERVED_NAME_KIND
from conveyor_api.served_name import build_served_name, may_claim, root_name
from conveyor_kube.resources import claim_collection
from conveyor_kube.served_names import Claim, ClaimSink, NameIndex
from conveyor_kube.watch import WatchState, watch_collection
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import ApiError, Refused, Unavailable
from conveyor_operator.kinds import EVENT, SERVED_NAME, Key
from conveyor_operator.loop.events import Event, build_event
from conveyor_operator.loop.workers import backoff_seconds
from conveyor_operator.served_names.answer import NameAnswer, NameState, RequestedName
from conveyor_operator.served_names.expiry import Expiry

logger = logging.getLogger(__name__)

_MAX_TRIES: Final = 5  # while the API server is unavailable; after the last one, the claim counts as refused
_REFUSED_SECONDS: Final = 30.0  # pause before a retry in a namespace in which a claim was refused


class ServedNames:
    """mark: called with the `namespace/name` of a service when the state of its name has changed."""

    def __init__(
        self,
        cluster: Cluster,
        namespaces: Sequence[str],
        system_namespace: str,
        mark: Callable[[str], None],
        expire_seconds: float = 0.0,
    ) -> None:
        """expire_seconds: the life of a claim whose name never served; 0: claims do not expire."""
        self._cluster = cluster
        self._mark = mark
        self._index = NameIndex()
        self._expiry = Expiry(cluster, self._index, expire_seconds)
        self._own_name = root_name(system_namespace)
        self._sink = ClaimSink(self._index, self._see_claim, self._lose_claim, self._end_listing)
        self._namespaces = {*namespaces, system_namespace} if namespaces else {""}
        self._unlisted = set(self._namespaces)
        self.synced = asyncio.Event()
        """Set once all claims are known."""
        self._answers: dict[str, NameAnswer] = {}
        self._open: dict[str, Claim | None] = {}
        """Names on which `run` has to decide, each with the claim that was deleted, or None."""
        self._opened = asyncio.Event()
        self._held_back: dict[str, dict[str, None]] = {}
        """By namespace: names without a claim, because of the limit or because the API server refused the claim."""
        self._refusals: dict[str, str] = {}
        """By namespace: the API server's error for its last claim."""
        # The gateways' own name is claimed as if the youngest of all services wanted it.
        self._index.put_service(f"{system_namespace}/*", self._own_name, sys.maxsize)

    def see(self, key: Key, requested: RequestedName | None) -> None:
        """Record a service with the name that it wants, or with None if it no longer exists."""
        service, namespace = str(key), key.namespace
        self._expiry.see(service, requested.name if requested is not None and requested.is_ready else None)
        names = {self._index.name_of(service), requested.name if requested is not None else None} - {None}
        before = {name: self._index.find_first(namespace, name) for name in names if name is not None}
        if requested is None:
            self._index.remove_service(service)
            self._answers.pop(service, None)
        else:
            self._index.put_service(service, requested.name, requested.created_unix)
            self._reopen(requested.name)
        for name, first in before.items():
            if first != self._index.find_first(namespace, name):
                self._let_go(namespace, name)
                self._mark_changed(name)

    def follow(self, service: str, name: str) -> NameAnswer:
        """Return the state of the name for the service `namespace/name`.

        From then on, `mark` is called with the service when this state changes.
        """
        answer = self._answers[service] = self._find(service, name)
        return answer

    async def run(self, services_listed: Callable[[], Awaitable[None]]) -> None:
        """Claim names until cancelled. Nothing is claimed before all services and all claims are known."""
        async with asyncio.TaskGroup() as tasks:
            for namespace in self._namespaces:
                collection = claim_collection(namespace)
                state = WatchState(collection.name)
                tasks.create_task(watch_collection(self._cluster.client, collection, self._sink, state))
            await self.synced.wait()
            await services_listed()
            for name in self._index.list_unclaimed():
                await self._decide(name, self._open.pop(name, None))
            tasks.create_task(self._expiry.run())
            while True:
                while self._open:
                    name = next(iter(self._open))
                    await self._decide(name, self._open.pop(name))
                self._opened.clear()
                await self._opened.wait()

    def _find(self, service: str, name: str) -> NameAnswer:
        namespace = service.partition("/")[0]
        if not may_claim(namespace, name):
            return NameAnswer(NameState.NOT_ALLOWED)
        holder = self._index.find_holder(name)
        if holder == namespace:
            first = self._index.find_first(namespace, name)
            if first is None or first == service:
                return NameAnswer(NameState.HELD)
            return NameAnswer(NameState.SHARED, first.partition("/")[2])
        if holder is not None:
            return NameAnswer(NameState.TAKEN)
        if self._index.count_claims(namespace) >= MAX_SERVED_NAMES:
            return NameAnswer(NameState.TOO_MANY)
        return NameAnswer(NameState.PENDING, self._refusals.get(namespace, ""))

    def _mark_changed(self, name: str) -> None:
        """Mark the services that want this name and whose last answer has changed."""
        for namespace in self._index.list_applicants(name):
            for service in self._index.list_siblings(namespace, name):
                if service in self._answers and self._answers[service] != self._find(service, name):
                    self._mark(service)

    def _end_listing(self, namespace: str) -> None:
        self._unlisted.discard(namespace)
        if not self._unlisted:
            self.synced.set()

    def _see_claim(self, claim: Claim) -> None:
        for name in (claim.name, *self._index.list_longer(claim.name)):
            self._mark_changed(name)

    def _lose_claim(self, claim: Claim) -> None:
        self._open[claim.name] = claim
        self._opened.set()
        self._try_next(claim.namespace)
        for name in self._index.list_longer(claim.name):
            self._mark_changed(name)

    def _reopen(self, name: str) -> None:
        if self._index.find_holder(name) is None:
            self._open.setdefault(name, None)
            self._opened.set()

    def _let_go(self, namespace: str, name: str) -> None:
        """Stop holding back a name for a namespace in which no service wants it any more."""
        if self._index.find_first(namespace, name) is None and namespace in self._held_back:
            self._held_back[namespace].pop(name, None)

    def _hold_back(self, namespace: str, name: str) -> None:
        self._held_back.setdefault(namespace, {})[name] = None

    def _try_next(self, namespace: str) -> None:
        """Reopen one of the names that were held back for the namespace."""
        names = self._held_back.get(namespace, {})
        if names:
            name = next(iter(names))
            del names[name]
            self._reopen(name)
        if not names:
            self._held_back.pop(namespace, None)

    async def _decide(self, name: str, former: Claim | None) -> None:
        """Claim an unclaimed name. Tries its former namespace, then the others by the age of their oldest services.

        If the former claim has expired, its namespace is the last one.
        """
        last = former.namespace if former is not None else None
        has_expired = former is not None and former.uid in self._expiry.expired
        if former is not None:
            self._expiry.expired.discard(former.uid)
        for namespace in sorted(self._index.list_applicants(name), key=lambda each: (each != last) != has_expired):
            if self._index.find_holder(name) is not None:
                break
            if may_claim(namespace, name):
                await self._apply(namespace, name)
        self._mark_changed(name)
        if former is not None and self._index.find_holder(name) != former.namespace:
            await self._record_release(former)

    async def _apply(self, namespace: str, name: str) -> None:
        """Create a claim for the namespace, if it may have one more."""
        if self._index.count_claims(namespace) >= MAX_SERVED_NAMES or namespace in self._refusals:
            self._hold_back(namespace, name)
            return
        try:
            made = await self._create(namespace, name)
        except ApiError as error:
            # A Conflict means that this claim exists and the watch will report it, or that two names have one hash.
            if not (isinstance(error, Refused) and error.is_of_leaving_namespace):
                logger.warning("event=claim_refused namespace=%s name=%s error=%s", namespace, name, error.message)
            self._refusals[namespace] = error.message
            self._hold_back(namespace, name)
            asyncio.get_running_loop().call_later(_REFUSED_SECONDS, self._end_refusal, namespace)
        else:
            logger.info("event=name_claimed namespace=%s name=%s", namespace, name)
            self._sink.put(made)
            self._try_next(namespace)

    def _end_refusal(self, namespace: str) -> None:
        del self._refusals[namespace]
        self._try_next(namespace)

    async def _create(self, namespace: str, name: str) -> dict[str, object]:
        """Create the claim, with retries. Raises ApiError."""
        claim = build_served_name(namespace, name, is_unserved=name != self._own_name)
        for tries in range(1, _MAX_TRIES):
            try:
                return await self._cluster.create(SERVED_NAME, claim)
            except Unavailable as error:
                logger.warning("event=claim_failed namespace=%s name=%s error=%s", namespace, name, error.message)
                await asyncio.sleep(max(backoff_seconds(tries), error.retry_after_seconds or 0.0))
        return await self._cluster.create(SERVED_NAME, claim)

    async def _record_release(self, claim: Claim) -> None:
        logger.info("event=name_released namespace=%s name=%s", claim.namespace, claim.name)
        metadata = {"namespace": claim.namespace, "name": claim.object_name, "uid": claim.uid}
        body = {"apiVersion": API_VERSION, "kind": SERVED_NAME_KIND, "metadata": metadata}
        released = Event("NameReleased", f"the name {claim.name!r} no longer belongs to this namespace")
        with suppress(ApiError):  # its namespace may be terminating
            await self._cluster.create(EVENT, build_event(body, released, datetime.now(UTC)))
