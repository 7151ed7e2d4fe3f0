"""Requests tokens of a ServiceAccount from the API server, with an audience that no other program accepts."""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import aiohttp
from kubernetes.aio.client import ApiClient

from conveyor_http.reading import AnswerTooLong, read_answer

_LIFE_SECONDS: Final = 6 * 3600  # the API server may shorten it. So engines work if it is away for three hours
_TIMEOUT: Final = aiohttp.ClientTimeout(total=10)
_MAX_BYTES: Final = 64 << 10


class TokenNotIssued(Exception):
    """The API server has refused a token, or sent something else."""


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """A token. It should be replaced from `renew_unix` on."""

    text: str
    renew_unix: float
    expires_unix: float


async def request_token(client: ApiClient, namespace: str, account: str, audience: str) -> IssuedToken:
    """Return a new token of the ServiceAccount. Raises TokenNotIssued, and the errors of a failed connection."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    spec = {"audiences": [audience], "expirationSeconds": _LIFE_SECONDS}
    request = await client.param_serialize(
        "POST",
        path,
        header_params={"Accept": "application/json", "Content-Type": "application/json"},
        body={"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
        auth_settings=["BearerToken"],
    )
    response: aiohttp.ClientResponse = (await client.call_api(*request, _request_timeout=_TIMEOUT)).response
    async with response:
        try:
            content = await read_answer(response.content, _MAX_BYTES)
            if response.status != 201:
                raise TokenNotIssued(f"POST {path}: {response.status}: {content[:300].decode(errors='replace')}")
            issued = json.loads(content)
            requested = datetime.fromisoformat(issued["metadata"]["creationTimestamp"]).timestamp()
            expires = datetime.fromisoformat(issued["status"]["expirationTimestamp"]).timestamp()
            return IssuedToken(str(issued["status"]["token"]), (requested + expires) / 2, expires)
        except (AnswerTooLong, ValueError, LookupError, TypeError) as error:
            raise TokenNotIssued(f"POST {path}: the API server sent no token: {error}") from error
