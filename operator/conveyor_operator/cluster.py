"""All calls to the Kubernetes API except watches.

Modules that watch use this module's connection, too. Objects are plain dictionaries. A failed call raises an exception
from `errors`. The module uses `kubernetes.aio`'s dynamic client with fixed paths: all kinds are known, so it needs no
discovery. It makes no decisions.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient

from conveyor_api import names
from conveyor_kube.authorities import follow_authorities
from conveyor_operator.errors import ApiError, Conflict, Refused, Unavailable
from conveyor_operator.kinds import LEASE, ObjectKind
from conveyor_operator.metrics import Metrics
from conveyor_operator.pace import Pace

Object = dict[str, Any]

_TIMEOUT = aiohttp.ClientTimeout(total=30)
_MERGE_PATCH = "application/merge-patch+json"
_JSON_PATCH = "application/json-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"
_JSON = "application/json"
_NO_VERSION = "1"  # etcd's revision before its first write, so no object has it


class Cluster:
    """An open connection; use as `async with`.

    It makes at most `calls_per_second` calls a second on average. Watches and calls for the Lease are not counted.
    """

    def __init__(self, configuration: Any, metrics: Metrics, calls_per_second: float = math.inf) -> None:
        self.client = client.ApiClient(configuration)
        """The client that modules pass to `conveyor_kube.watch`."""
        self._dynamic = DynamicClient(self.client)
        self._metrics = metrics
        self._pace = Pace(calls_per_second)
        self._authorities_file = configuration.ssl_ca_cert

    async def __aenter__(self) -> Self:
        tls = self.client.rest_client.ssl_context
        self._following = asyncio.create_task(follow_authorities(self._authorities_file, tls))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._following.cancel()
        await self.client.close()

    async def is_served(self, kind: ObjectKind) -> bool:
        """Return whether the API server serves this kind. If so, its CRD is installed and established."""
        try:
            found = await self._call("get", kind, f"/apis/{kind.group}/{kind.version}", label="discovery")
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return any(resource["name"] == kind.plural for resource in found["resources"])

    async def get(self, kind: ObjectKind, namespace: str | None, name: str) -> Object | None:
        """Return the object; None if it does not exist."""
        try:
            return await self._call("get", kind, kind.path(namespace, name))
        except Refused as error:
            if error.status == 404:
                return None
            raise

    async def apply(
        self, kind: ObjectKind, body: Object, manager: str, *, force: bool = True, must_be_new: bool = False
    ) -> Object:
        """Create or update an object by server-side apply of `body`. Returns the whole object.

        With `must_be_new`, raise Conflict if the object exists, and change nothing. The call then sends a resource
        version that no object can have. The API server checks it only if the object exists.
        """
        metadata = body["metadata"]
        if must_be_new:
            body = {**body, "metadata": {**metadata, "resourceVersion": _NO_VERSION}}
        path = kind.path(metadata.get("namespace"), metadata["name"])
        query = [("fieldManager", manager), ("force", "true" if force else "false"), ("fieldValidation", "Strict")]
        return await self._call("patch", kind, path, body, _APPLY_PATCH, query)

    async def merge(self, kind: ObjectKind, namespace: str | None, name: str, patch: Object, manager: str) -> Object:
        """Change fields of an existing object by a merge patch.

        Used for the Lease, for the metrics server's Secret, and for an APIService that another adapter has taken over.
        """
        path = kind.path(namespace, name)
        return await self._call("patch", kind, path, patch, _MERGE_PATCH, [("fieldManager", manager)])

    async def replace_status(self, kind: ObjectKind, body: Object, status: Object) -> Object:
        """Replace the status of `body`; return the whole resource. Raises Refused if a new object has the name.

        It is a JSON patch, because with many labels, server-side apply costs the API server five times as much.
        """
        metadata = body["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"], "status")
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
            {"op": "add", "path": "/status", "value": status},
        ]
        query = [("fieldManager", names.FIELD_MANAGER), ("fieldValidation", "Strict")]
        return await self._call("patch", kind, path, patch, _JSON_PATCH, query)

    async def create(self, kind: ObjectKind, body: Object) -> Object:
        return await self._call("post", kind, kind.path(body["metadata"]["namespace"]), body, _JSON)

    async def delete(
        self, kind: ObjectKind, namespace: str | None, name: str, uid: str, version: str | None = None
    ) -> None:
        """Delete exactly the object with this uid. Do nothing if it is gone.

        Without `version`, also do nothing if it was replaced. With `version`, raise Conflict if it was replaced or no
        longer has this resource version.
        """
        preconditions = {"uid": uid} | ({"resourceVersion": version} if version else {})
        options = {"preconditions": preconditions, "propagationPolicy": "Background"}
        try:
            await self._call("delete", kind, kind.path(namespace, name), options, _JSON)
        except (Refused, Conflict) as error:
            if error.status != 404 and (error.status != 409 or version):
                raise

    async def _call(
        self,
        method: str,
        kind: ObjectKind,
        path: str,
        body: Object | Sequence[Object] | None = None,
        content_type: str | None = None,
        query: Sequence[tuple[str, str]] = (),
        label: str = "",
    ) -> Object:
        status = "0"
        if kind != LEASE:  # the holder must renew it in time, however many calls wait
            self._metrics.api_wait_seconds.inc(await self._pace.wait())
        try:
            answer: Object = await self._dynamic.request(
                method,
                path,
                body=body,
                content_type=content_type,
                query_params=list(query),
                header_params={"Accept": _JSON},
                serializer=lambda _, content: content,
                _request_timeout=_TIMEOUT,
            )
            status = "2xx"
            return answer
        except ApiException as error:
            status = str(error.status)
            raise translate(error) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(0, "NoConnection", f"{method} {path}: {error!r}") from error
        except RecursionError as error:
            raise Refused(0, "Unreadable", f"{method} {path}: the object's JSON is nested too deeply") from error
        finally:
            self._metrics.api_calls.labels(label or method, kind.plural, status).inc()


def translate(error: ApiException) -> ApiError:
    """Convert the client's exception to one of `errors`, with the API server's message."""
    status, reason, message = int(error.status or 0), str(error.reason or ""), str(error.body or "")
    try:
        answer = json.loads(error.body)
        reason, message = str(answer.get("reason") or reason), str(answer.get("message") or message)
    except (ValueError, TypeError, AttributeError):
        pass  # not a Status object, for example the error page of a proxy
    if status == 409:
        return Conflict(status, reason, message)
    if status in (401, 408, 429) or status >= 500 or status == 0:
        return Unavailable(status, reason, message, _retry_after_seconds(error.headers))
    return Refused(status, reason, message)


def _retry_after_seconds(headers: Mapping[str, str] | None) -> float | None:
    value = (headers or {}).get("Retry-After", "")
    return float(value) if value.isdigit() else None


async def wait_for(cluster: Cluster, kind: ObjectKind, interval_seconds: float) -> AsyncIterator[str]:
    """Poll until `kind` is served. Yields the reason for waiting after each poll without success."""
    while True:
        try:
            if await cluster.is_served(kind):
                return
            waiting_for = f"the CRD {kind.plural}.{kind.group} is not installed"
        except ApiError as error:
            waiting_for = f"the API server does not answer: {error.message}"
        yield waiting_for
        await asyncio.sleep(interval_seconds)
