"""Decides who a caller is and which namespaces the caller sees, by the caller's rights in Kubernetes.

A TokenReview returns the user of a bearer token. SubjectAccessReviews return whether this user may list
InferenceServices, or APIKeys, in the cluster or in a namespace. Both answers are kept for _KEPT_SECONDS, so a right
that is taken away ends that late. Tokens themselves are not kept: the keys are their hashes. Rights are kept by user,
so further tokens of a user cost one review each. Those who want the same answer at the same time share one review.
"""

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from kubernetes.aio.client import ApiClient

from conveyor_api.names import GROUP, PLURAL
from conveyor_console.kubernetes_api import Unanswered, call
from conveyor_console.sharing import Shared

logger = logging.getLogger(__name__)

MAX_TOKEN_BYTES: Final = 7 << 10
_KEPT_SECONDS: Final = 60.0
_MAX_CALLERS: Final = 1000  # invalid tokens are among them
_MAX_VERDICTS: Final = 10_000
_MAX_AT_ONCE: Final = 16  # reviews in flight, of all callers
_MAX_EACH: Final = 4  # of one page
_TOKEN_ID: Final = "authentication.kubernetes.io/credential-id"
_MAX_BYTES: Final = 1 << 20
_EVERYWHERE: Final = ""


class Unavailable(Exception):
    """The API server did not answer a review. The message has no address."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated user. `attributes`: the user as SubjectAccessReview names it. `rights`: a hash of them."""

    name: str
    attributes: Mapping[str, Any]
    rights: bytes


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
        self._callers = Shared[bytes, Caller | None](_KEPT_SECONDS, _MAX_CALLERS)  # by the token's hash
        self._verdicts = Shared[tuple[bytes, str, str], bool](_KEPT_SECONDS, _MAX_VERDICTS)  # rights, namespace, kind
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)

    async def identify(self, token: str) -> Caller | None:
        """Return the token's user; None if the token is not valid. Raises Unavailable."""
        if not token or len(token) > MAX_TOKEN_BYTES:
            return None
        key = hashlib.sha256(token.encode(errors="replace")).digest()
        return await self._callers.get(key, lambda: self._review_token(token))

    async def find_visible(self, caller: Caller, namespaces: Iterable[str], plural: str = PLURAL) -> frozenset[str]:
        """Return those of the namespaces in which the caller may list objects of a kind. Raises Unavailable.

        plural: InferenceServices, or another kind of Conveyor. "" is visible to callers who may list it everywhere.
        """
        wanted = frozenset(namespaces)
        if await self._may_list(caller, _EVERYWHERE, plural):
            return wanted
        remaining, visible = iter(sorted(wanted)), set[str]()

        async def go_on() -> None:
            for namespace in remaining:
                if await self._may_list(caller, namespace, plural):
                    visible.add(namespace)

        await asyncio.gather(*(go_on() for _ in range(_MAX_EACH)))
        return frozenset(visible)

    async def _review_token(self, token: str) -> Caller | None:
        status = await self._review("authentication.k8s.io", "TokenReview", {"token": token})
        return _build_caller(status.user) if status.authenticated else None

    async def _may_list(self, caller: Caller, namespace: str, plural: str) -> bool:
        key = caller.rights, namespace, plural
        return await self._verdicts.get(key, lambda: self._review_right(caller, namespace, plural))

    async def _review_right(self, caller: Caller, namespace: str, plural: str) -> bool:
        resource = {"verb": "list", "group": GROUP, "resource": plural, "namespace": namespace}
        spec = {**caller.attributes, "resourceAttributes": resource}
        return (await self._review("authorization.k8s.io", "SubjectAccessReview", spec)).allowed

    async def _review(self, group: str, kind: str, spec: Mapping[str, Any]) -> _ReviewStatus:
        body = {"apiVersion": f"{group}/v1", "kind": kind, "spec": spec}
        try:
            async with self._turns:
                status, content = await call(
                    self._client, "POST", f"/apis/{group}/v1/{kind.lower()}s", _MAX_BYTES, body=body
                )
            if status not in (200, 201):
                raise Unavailable(f"the API server answers a {kind} with status {status}")
            return msgspec.json.decode(content, type=_Review).status
        except (Unanswered, msgspec.DecodeError) as error:
            logger.debug("event=review_failed kind=%s error=%s", kind, error)
            raise Unavailable(f"the API server does not answer a {kind}") from error


def _build_caller(user: _User) -> Caller:
    """Return the user with the hash of everything that may decide the rights.

    That is all but the token's id. Some authorizers read `extra`, such as OpenShift's, which limits tokens to scopes.
    """
    extra = user.extra or {}
    attributes = {"user": user.username, "uid": user.uid, "groups": user.groups or [], "extra": extra}
    deciding = {**attributes, "extra": {name: each for name, each in extra.items() if name != _TOKEN_ID}}
    rights = hashlib.sha256(msgspec.json.encode(deciding, order="deterministic")).digest()
    return Caller(user.username, attributes, rights)
