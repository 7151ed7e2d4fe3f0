"""Writes the two APIServices as `registration` has decided: both or none.

Used by `keeper`. It reads the keeper's view of both, and updates this view after its own writes. From an APIService of
another owner it only removes Conveyor's owner reference and labels.
"""

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass

from conveyor_api import names
from conveyor_operator.cluster import Cluster, Object
from conveyor_operator.errors import ApiError
from conveyor_operator.kinds import API_SERVICE, CLUSTER_ROLE, SERVICE
from conveyor_operator.metrics_api.following import remember
from conveyor_operator.metrics_api.registration import (
    API_SERVICES,
    build_api_service,
    build_release,
    differs,
    is_ours,
)
from conveyor_operator.metrics_api.server import probe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Named:
    """The objects that the APIServices refer to: the metrics server's Service, and the ClusterRole as owner."""

    service: Object
    role: Object


class Registrar:
    """api_services: the known state of both APIServices, by name. namespace: the metrics server's."""

    def __init__(self, cluster: Cluster, namespace: str, api_services: MutableMapping[str, Object | None]) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._api_services = api_services
        self._named: _Named | None = None
        self._withdrawn: dict[str, str] = {}  # uid of the last APIService that was deleted here, by name

    def has_withdrawn(self, name: str, api_service: Object) -> bool:
        """Return whether `withdraw`, and not somebody else, deleted this APIService."""
        return self._withdrawn.get(name) == str(api_service["metadata"]["uid"])

    async def register(self, bundle: bytes) -> str:
        """Create both APIServices if the metrics server responds with a certificate that `bundle` trusts.

        bundle: certificates of authorities, in PEM. Returns why the APIServices were not created, or "".
        """
        self._named = None
        if fault := await self._read_named():
            return fault
        assert self._named is not None, "there was no fault"
        host = f"{names.METRICS_SERVICE}.{self._namespace}.svc"
        if fault := await probe(self._named.service, host, bundle):
            return fault
        try:
            await self.announce(bundle)
        except ApiError:
            await self.withdraw("one of the two APIServices could not be registered")
            raise
        return ""

    async def announce(self, bundle: bytes) -> None:
        """Apply both APIServices with this bundle. Raises Conflict if somebody else changes one meanwhile."""
        if self._named is None:
            await self._read_named()
        if self._named is None:
            return  # the API server will soon report them as unavailable
        for name in reversed(API_SERVICES):  # v1beta1 first, because another adapter would also have that version
            found = self._api_services[name]
            wanted = build_api_service(name, self._named.service, bundle, self._named.role)
            if found is not None and not differs(found, wanted):
                continue
            logger.info("event=api_service_written name=%s", name)
            if found is not None:
                wanted["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
            # Without force, an APIService that another owner has made meanwhile is left alone.
            write = self._cluster.apply(API_SERVICE, wanted, names.FIELD_MANAGER, force=found is not None)
            await remember(self._api_services, name, write)

    async def withdraw(self, why: str) -> None:
        """Delete Conveyor's APIServices.

        If somebody else takes over one meanwhile, raise Conflict and keep it.
        """
        for name, found in self._api_services.items():
            if found is not None and is_ours(found, self._namespace):
                logger.warning("event=api_service_withdrawn name=%s reason=%s", name, why)
                metadata = found["metadata"]
                self._withdrawn[name] = metadata["uid"]  # before the watch can report it
                await self._cluster.delete(API_SERVICE, None, name, metadata["uid"], metadata["resourceVersion"])
                left = self._api_services[name]
                if left is not None and left["metadata"]["uid"] == metadata["uid"]:
                    self._api_services[name] = None

    async def release(self) -> None:
        """Remove Conveyor's owner reference from an APIService that another adapter has taken over.

        Otherwise uninstalling Conveyor would delete it.
        """
        for name, found in self._api_services.items():
            if found is None or is_ours(found, self._namespace):
                continue
            if patch := build_release(found):
                logger.info("event=api_service_left_to_other name=%s", name)
                write = self._cluster.merge(API_SERVICE, None, name, patch, names.FIELD_MANAGER)
                await remember(self._api_services, name, write)

    async def _read_named(self) -> str:
        """Read the Service and the ClusterRole. Returns which one is missing, or ""."""
        service = await self._cluster.get(SERVICE, self._namespace, names.METRICS_SERVICE)
        role = await self._cluster.get(CLUSTER_ROLE, None, names.METRICS_API_ROLE)
        if service is None:
            return f"there is no Service {names.METRICS_SERVICE}"
        if role is None:
            return f"there is no ClusterRole {names.METRICS_API_ROLE}"
        self._named = _Named(service, role)
        return ""
