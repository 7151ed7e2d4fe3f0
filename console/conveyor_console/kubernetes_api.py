"""Sends one request to the API server, with the console's own rights or with the caller's. Used by `access`, `events`
and `usage`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
from kubernetes.aio.client import ApiClient

from conveyor_http.reading import AnswerTooLong, read_answer

_TIMEOUT: Final = aiohttp.ClientTimeout(total=10)


class Unanswered(Exception):
    """The API server sent no answer that can be read."""


async def call(
    client: ApiClient,
    method: str,
    path: str,
    max_bytes: int,
    query: Sequence[tuple[str, str]] = (),
    body: Mapping[str, Any] | None = None,
    token: str = "",
) -> tuple[int, bytes]:
    """Return the status and the body of the answer. token: the caller's; "": with the console's rights.

    Raises Unanswered.
    """
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    own = [] if token else ["BearerToken"]
    request = await client.param_serialize(
        method, path, query_params=list(query), header_params=headers, body=body, auth_settings=own
    )
    try:
        response: aiohttp.ClientResponse = (await client.call_api(*request, _request_timeout=_TIMEOUT)).response
        async with response:
            return response.status, bytes(await read_answer(response.content, max_bytes))
    except (aiohttp.ClientError, TimeoutError, OSError, AnswerTooLong) as error:
        raise Unanswered(str(error) or type(error).__name__) from error
