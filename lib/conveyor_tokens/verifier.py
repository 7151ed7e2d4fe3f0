"""Verifies tokens of ServiceAccounts with the keys that their issuer publishes, without a call for each token.

A token is verified once and its account is remembered by the token's hash, up to MAX_REMEMBERED tokens, so that a
request costs a hash and not a signature. A token is valid until it expires, also after its pod or ServiceAccount was
deleted (docs/adr/0179).
"""

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import jwt

MAX_TOKEN_CHARACTERS: Final = 4096  # Kubernetes' tokens have about 1,200
MAX_REMEMBERED: Final = 4096
LEEWAY_SECONDS: Final = 30.0  # between the clocks of the API server and of this machine
ACCOUNT_PREFIX: Final = "system:serviceaccount:"
# Kubernetes signs with these. Each key is only used with its own algorithm, whatever a token says.
_ALGORITHMS: Final = frozenset({"RS256", "ES256", "ES384", "ES512"})
_CLAIMS: Final = ("exp", "iat", "nbf", "iss", "aud", "sub")
_TOKEN: Final = re.compile(r"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_LABEL: Final = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBJECT: Final = re.compile(rf"{ACCOUNT_PREFIX}({_LABEL}):[a-z0-9][-.a-z0-9]{{0,252}}")

Account = TypeVar("Account")


class TokenRejected(Exception):
    """The token proves no ServiceAccount. The text says why, and contains nothing secret."""


class UnknownKey(TokenRejected):
    """The token names a key that is not known. The issuer may have begun to use a new one."""


class TokenVerifier(Generic[Account]):
    """The keys of one issuer, for tokens of one audience."""

    def __init__(
        self, audience: str, build: Callable[[str, str], Account], now_unix: Callable[[], float] = time.time
    ) -> None:
        """build: makes what `verify` returns from `system:serviceaccount:NAMESPACE:NAME` and the namespace."""
        self._audience, self._build, self._now_unix = audience, build, now_unix
        self._issuer = ""
        self._published: Sequence[Mapping[str, Any]] = ()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._remembered: dict[bytes, tuple[Account, float]] = {}  # with the last second, by the token's hash

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    def set_keys(self, issuer: str, published: Sequence[Mapping[str, Any]]) -> bool:
        """Use these JSON Web Keys from now on. Returns False if they are the same as before.

        The accounts that other keys have proved are forgotten. Keys that Kubernetes does not sign with are left out.
        """
        if (issuer, published) == (self._issuer, self._published):
            return False
        self._issuer, self._published = issuer, published
        self._keys = dict(filter(None, map(_read_key, published)))
        self._remembered.clear()
        return True

    def verify(self, text: str) -> Account:
        """Return the account of a token that `is_token` accepts. Raises TokenRejected, which may be UnknownKey."""
        if len(text) > MAX_TOKEN_CHARACTERS:
            raise TokenRejected(f"it has more than {MAX_TOKEN_CHARACTERS} characters")
        digest = hashlib.sha256(text.encode()).digest()
        account, last_unix = self._remembered.get(digest, (None, 0.0))
        if account is not None and self._now_unix() < last_unix:
            return account
        try:
            account, last_unix = self._decode(text)
        except (jwt.PyJWTError, RecursionError) as error:  # clients choose how deep a token's JSON is nested
            raise TokenRejected(str(error)) from error
        if len(self._remembered) >= MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered[digest] = (account, last_unix)
        return account

    def _decode(self, text: str) -> tuple[Account, float]:
        """Verify a token. Raises TokenRejected and PyJWTError."""
        unverified = jwt.decode_complete(text, options={"verify_signature": False})
        if self._issuer and unverified["payload"].get("iss") != self._issuer:
            raise TokenRejected("another issuer has issued it")
        key = self._keys.get(str(unverified["header"].get("kid")))
        if key is None:
            raise UnknownKey("it is signed with an unknown key")
        claims = jwt.decode(
            text,
            key,
            algorithms=[key.algorithm_name],
            audience=self._audience,
            issuer=self._issuer,
            leeway=LEEWAY_SECONDS,
            options={"require": list(_CLAIMS)},
        )
        match = _SUBJECT.fullmatch(str(claims["sub"]))
        if match is None:
            raise TokenRejected("it is not of a ServiceAccount")
        return self._build(match[0], match[1]), claims["exp"] + LEEWAY_SECONDS


def is_token(text: str) -> bool:
    """Return whether the text has the form of a token, or begins like one and is too long to look at."""
    return text.startswith("eyJ") and (len(text) > MAX_TOKEN_CHARACTERS or _TOKEN.fullmatch(text) is not None)


def _read_key(published: Mapping[str, Any]) -> tuple[str, jwt.PyJWK] | None:
    """Return the key with its id; None for a key that Kubernetes does not sign with."""
    kid, algorithm = published.get("kid"), published.get("alg")
    if not isinstance(kid, str) or algorithm not in _ALGORITHMS:
        return None
    try:
        return kid, jwt.PyJWK(dict(published))
    except (jwt.PyJWTError, ValueError, TypeError):
        return None
