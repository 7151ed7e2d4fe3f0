"""Decides who a caller is and which namespaces the caller sees, by the caller's rights in Kubernetes.

A TokenReview returns the user of a bearer token. SubjectAccessReviews return whether this user may list
InferenceServices in the cluster or in a namespace. Both answers are kept for _KEPT_SECONDS, so a right that is taken
away ends that late. Tokens themselves are not kept: the keys are their hashes.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient

from conveyor_api.names import GROUP, PLURAL
from conveyor_http.reading import AnswerTooLong, read_answer

MAX_TOKEN_BYTES: Final = 7 << 10
_KEPT_SECONDS: Final = 60.0
_MAX_CALLERS: Final = 500
_MAX_AT_ONCE: Final = 16  # reviews in flight, of all callers
_MAX_BYTES: Final = 1 << 20
_TIMEOUT: Final = aiohttp.ClientTimeout(total=10)
_EVERYWHERE: Final = ""


class Unavailable(Exception):
    """The API server did not answer a review. The message has the reason."""


@dataclass(slots=True)
class Caller:
    """An authenticated user. `attributes`: the user as SubjectAccessReview names it."""

    name: str
    attributes: Mapping[str, Any]
    until: float
    verdicts: dict[str, bool] = field(default_factory=dict)
    """Whether the user may list InferenceServices, by namespace; "" for all namespaces."""


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class _ReviewStatus(msgspec.Struct):
    authenticated: bool = False
    user: _User = msgspec.field(default_factory=_User)
    allowed: bool = False


class _Review(msgspec.Struct):
    status: _ReviewStatus = msgspec.field(default_factory=_ReviewStatus)


class Access:
    """Reviews tokens and rights."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._callers: OrderedDict[bytes, Caller] = OrderedDict()  # by the token's hash
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)

    async def identify(self, token: str) -> Caller | None:
        """Return the token's user; None if the token is not valid. Raises Unavailable."""
        if not token or len(token) > MAX_TOKEN_BYTES:
            return None
        key, now = hashlib.sha256(token.encode(errors="replace")).digest(), time.monotonic()
        kept = self._callers.get(key)
        if kept is not None and kept.until > now:
            return kept
        status = await self._review("authentication.k8s.io", "TokenReview", {"token": token})
        if not status.authenticated:
            self._callers.pop(key, None)
            return None
        user = status.user
        attributes = {"user": user.username, "uid": user.uid, "groups": user.groups or [], "extra": user.extra or {}}
        caller = self._callers[key] = Caller(user.username, attributes, now + _KEPT_SECONDS)
        self._callers.move_to_end(key)
        while len(self._callers) > _MAX_CALLERS:
            self._callers.popitem(last=False)
        return caller

    async def find_visible(self, caller: Caller, namespaces: Iterable[str]) -> frozenset[str]:
        """Return those of the namespaces in which the caller may list InferenceServices. Raises Unavailable."""
        wanted = frozenset(namespaces)
        if await self._may_list(caller, _EVERYWHERE):
            return wanted
        ordered = sorted(wanted)
        verdicts = await asyncio.gather(*(self._may_list(caller, each) for each in ordered))
        return frozenset(each for each, allowed in zip(ordered, verdicts, strict=True) if allowed)

    async def _may_list(self, caller: Caller, namespace: str) -> bool:
        known = caller.verdicts.get(namespace)
        if known is not None:
            return known
        resource = {"verb": "list", "group": GROUP, "resource": PLURAL, "namespace": namespace}
        spec = {**caller.attributes, "resourceAttributes": resource}
        status = await self._review("authorization.k8s.io", "SubjectAccessReview", spec)
        return caller.verdicts.setdefault(namespace, status.allowed)

    async def _review(self, group: str, kind: str, spec: Mapping[str, Any]) -> _ReviewStatus:
        body = {"apiVersion": f"{group}/v1", "kind": kind, "spec": spec}
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        request = await self._client.param_serialize(
            "POST", f"/apis/{group}/v1/{kind.lower()}s", header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            async with self._turns:
                response: aiohttp.ClientResponse = (
                    await self._client.call_api(*request, _request_timeout=_TIMEOUT)
                ).response
                async with response:
                    content = await read_answer(response.content, _MAX_BYTES)
            if response.status not in (200, 201):
                raise Unavailable(f"the API server answers a {kind} with status {response.status}")
            return msgspec.json.decode(content, type=_Review).status
        except (aiohttp.ClientError, TimeoutError, OSError, AnswerTooLong, msgspec.DecodeError) as error:
            raise Unavailable(f"the API server does not answer a {kind}: {error or type(error).__name__}") from error
