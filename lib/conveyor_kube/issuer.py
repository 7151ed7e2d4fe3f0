"""Follows the public keys with which the cluster signs the tokens of ServiceAccounts. Reads only.

The API server publishes them to every ServiceAccount (OpenID Connect discovery), so a program with these keys verifies
tokens without a call for each token. The keys are read from the API server itself, never from another URL that the
discovery document or a token may name.
"""

import asyncio
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from kubernetes.aio.client import ApiClient

from conveyor_http.reading import AnswerTooLong, read_answer
from conveyor_kube.watch import WatchFailed, open_page

logger = logging.getLogger(__name__)

Json = dict[str, Any]

DISCOVERY_PATH: Final = "/.well-known/openid-configuration"
KEYS_PATH: Final = "/openid/v1/jwks"
_REFRESH_SECONDS: Final = 60.0
_TIMEOUT: Final = aiohttp.ClientTimeout(total=10)
_TYPES: Final = "application/json, application/jwk-set+json"
_MAX_BYTES: Final = 256 << 10
_UNREADABLE: Final = (TimeoutError, OSError, aiohttp.ClientError, ValueError, TypeError, LookupError, WatchFailed)


@dataclass(frozen=True, slots=True)
class Issuer:
    """The issuer of a cluster's tokens, with its JSON Web Keys."""

    name: str
    keys: tuple[Json, ...]


async def follow_issuer(
    client: ApiClient,
    on_keys: Callable[[str, list[Json]], None],
    on_attempt: Callable[[], None],
    wanted: asyncio.Event,
    shortest_seconds: float,
) -> None:
    """Call `on_keys` with the issuer and its JSON Web Keys, and `on_attempt` after each attempt, until cancelled.

    The keys are read every minute, and soon after `wanted` is set, but at most every `shortest_seconds`. After a failed
    read, the former keys stay in use.
    """
    reported = ""
    while True:
        wanted.clear()
        try:
            on_keys(await _read_issuer(client), await _read_keys(client))
            reported = ""
        except _UNREADABLE as error:
            failure = str(error) or type(error).__name__
            if failure != reported:
                logger.warning("event=issuer_unreadable consequence=no_new_keys_for_tokens error=%s", failure[:300])
                reported = failure
        on_attempt()
        await asyncio.sleep(shortest_seconds)
        try:
            async with asyncio.timeout(random.uniform(0.8, 1.0) * _REFRESH_SECONDS):
                await wanted.wait()
        except TimeoutError:
            pass


async def _read_issuer(client: ApiClient) -> str:
    issuer = (await _read(client, DISCOVERY_PATH))["issuer"]
    if not isinstance(issuer, str) or not issuer:
        raise ValueError(f"{DISCOVERY_PATH} names no issuer")
    return issuer


async def _read_keys(client: ApiClient) -> list[Json]:
    keys = (await _read(client, KEYS_PATH))["keys"]
    return [key for key in keys if isinstance(key, dict)]


async def _read(client: ApiClient, path: str) -> Json:
    async with open_page(client, path, {}, _TIMEOUT, _TYPES) as response:
        try:
            content = json.loads(await read_answer(response.content, _MAX_BYTES))
        except AnswerTooLong as error:
            raise ValueError(f"{path} is longer than {_MAX_BYTES} bytes") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content
