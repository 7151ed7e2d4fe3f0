"""Verifies tokens of ServiceAccounts with the cluster's published keys, without a call for each token.

The source of objects passes the keys. A token is verified once and its caller is remembered by the token's hash, up to
MAX_REMEMBERED tokens, so that a request costs a hash and not a signature. A token is valid until it expires, also after
its pod or ServiceAccount was deleted (docs/adr/0179).
"""

import asyncio
import hashlib
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jwt

from conveyor_api.access import LABEL
from conveyor_api.names import TOKEN_AUDIENCE
from conveyor_gateway.caller import ACCOUNT_PREFIX, Caller
from conveyor_gateway.watching.keys import Proof

logger = logging.getLogger(__name__)

MAX_TOKEN_CHARACTERS: Final = 4096  # Kubernetes' tokens have about 1,200
MAX_REMEMBERED: Final = 4096
SHORTEST_SECONDS: Final = 5.0  # between two reads of the keys, whatever clients send
LEEWAY_SECONDS: Final = 30.0  # between the clocks of the API server and of the gateway
# Kubernetes signs with these. Each key is only used with its own algorithm, whatever a token says.
_ALGORITHMS: Final = frozenset({"RS256", "ES256", "ES384", "ES512"})
_CLAIMS: Final = ("exp", "iat", "nbf", "iss", "aud", "sub")
_TOKEN: Final = re.compile(r"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_SUBJECT: Final = re.compile(rf"{ACCOUNT_PREFIX}({LABEL}):[a-z0-9][-.a-z0-9]{{0,252}}")
_INVALID: Final = "this token is not valid: {}"


class Issuer:
    """The issuer of the cluster's tokens. `wanted` is set when a token names a key that is not known.

    Without `begin` nobody reads keys, so a token with an unknown key is rejected and never pending.
    """

    def __init__(self, now_unix: Callable[[], float] = time.time) -> None:
        self.wanted = asyncio.Event()
        self._now_unix = now_unix
        self._name = ""
        self._attempted_unix = math.inf  # the end of the last attempt to read the keys
        self._published: Sequence[Mapping[str, Any]] = ()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._remembered: dict[bytes, tuple[Caller, float]] = {}  # caller and last second, by the token's hash

    def begin(self) -> None:
        """Expect a first attempt to read the keys."""
        self._attempted_unix = -math.inf

    def note_attempt(self) -> None:
        """Note that an attempt to read the keys has ended, whether or not it has failed."""
        self._attempted_unix = self._now_unix()

    def set_keys(self, name: str, published: Sequence[Mapping[str, Any]]) -> None:
        """Use these keys from now on. Callers that other keys have proved are forgotten."""
        if (name, published) == (self._name, self._published):
            return
        self._name, self._published = name, published
        self._keys = dict(filter(None, map(_read_key, published)))
        self._remembered.clear()
        logger.info("event=issuer issuer=%s keys=%d", name, len(self._keys))

    def find(self, text: str) -> Proof | None:
        """Return the proof for a token; None if the text has not the form of a token."""
        if not text.startswith("eyJ") or (len(text) <= MAX_TOKEN_CHARACTERS and not _TOKEN.fullmatch(text)):
            return None
        if len(text) > MAX_TOKEN_CHARACTERS:
            return Proof(None, _INVALID.format(f"it has more than {MAX_TOKEN_CHARACTERS} characters"))
        digest = hashlib.sha256(text.encode()).digest()
        caller, last_unix = self._remembered.get(digest, (None, 0.0))
        if caller is not None and self._now_unix() < last_unix:
            return Proof(caller)
        try:
            return self._verify(text, digest)
        except (jwt.PyJWTError, RecursionError) as error:  # clients choose how deep a token's JSON is nested
            return Proof(None, _INVALID.format(error))

    def _verify(self, text: str, digest: bytes) -> Proof:
        """Verify a token and remember its caller. Raises PyJWTError."""
        unverified = jwt.decode_complete(text, options={"verify_signature": False})
        if self._name and unverified["payload"].get("iss") != self._name:
            return Proof(None, _INVALID.format("another issuer has issued it"))
        key = self._keys.get(str(unverified["header"].get("kid")))
        if key is None:
            self.wanted.set()
            is_due = self._now_unix() - self._attempted_unix >= SHORTEST_SECONDS
            return Proof(None, _INVALID.format("it is signed with an unknown key"), is_pending=is_due)
        claims = jwt.decode(
            text,
            key,
            algorithms=[key.algorithm_name],
            audience=TOKEN_AUDIENCE,
            issuer=self._name,
            leeway=LEEWAY_SECONDS,
            options={"require": list(_CLAIMS)},
        )
        match = _SUBJECT.fullmatch(str(claims["sub"]))
        if match is None:
            return Proof(None, _INVALID.format("it is not of a ServiceAccount"))
        caller = Caller(match[0], match[1])
        if len(self._remembered) >= MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered[digest] = (caller, claims["exp"] + LEEWAY_SECONDS)
        return Proof(caller)


def _read_key(published: Mapping[str, Any]) -> tuple[str, jwt.PyJWK] | None:
    """Return the key with its id; None for a key that Kubernetes does not sign with."""
    kid, algorithm = published.get("kid"), published.get("alg")
    if not isinstance(kid, str) or algorithm not in _ALGORITHMS:
        return None
    try:
        return kid, jwt.PyJWK(dict(published))
    except (jwt.PyJWTError, ValueError, TypeError):
        return None
