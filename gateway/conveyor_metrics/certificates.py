"""The two sides of the TLS handshake, followed while the server runs.

Ours: the serving certificate in a mounted Secret, which the operator fills and rotates. Theirs: the authority of the
front proxy, from `auth.Trust`. Used by `listener`. Knows no port and no request.

A caller without a certificate gets through the handshake, so that `auth` can answer it with 401. One with a foreign
certificate does not: Python's `ssl` verifies what is shown, or asks for nothing.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from prometheus_client import Gauge

from conveyor_metrics.auth import Trust

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0

SERVING_CERTIFICATE_EXPIRY = Gauge(
    "conveyor_metrics_serving_certificate_expiry_timestamp_seconds", "When the serving certificate ends."
)


@dataclass(frozen=True, slots=True)
class Serving:
    """A context for a listening socket, and the trust that it was made for."""

    context: ssl.SSLContext
    trust: Trust


class Certificates:
    """The files `tls.crt` and `tls.key` of a folder, and the latest trust; None until there is one."""

    def __init__(self, folder: Path) -> None:
        self.trust: Trust | None = None
        self._chain, self._key = folder / "tls.crt", folder / "tls.key"
        self._trust_changed = asyncio.Event()
        self._in_use: tuple[bytes, bytes, Trust] | None = None
        self._said = ""

    def set_trust(self, trust: Trust) -> None:
        self.trust = trust
        self._trust_changed.set()

    async def follow(self) -> AsyncIterator[Serving]:
        """Yield the certificate to serve with: when both sides exist, and after every change, until cancelled.

        Looks at the files once a second: a mounted Secret changes by a moved link, which no file event shows.
        """
        while True:
            self._trust_changed.clear()
            if serving := self._load_new():
                yield serving
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._trust_changed.wait()

    def _load_new(self) -> Serving | None:
        """Return the new certificate. None if it is unchanged or cannot be loaded: the current one stays in use."""
        chain, key, trust = _read(self._chain), _read(self._key), self.trust
        if trust is None or not chain or not key:
            self._say(f"waiting for {'the front proxy authority' if trust is None else self._chain}")
            return None
        if (chain, key, trust) == self._in_use:
            return None
        try:
            context = self._load(trust)
        except ssl.SSLError as error:
            self._say(f"{self._chain} and {self._key} cannot be loaded: {error}")
            return None
        self._in_use = chain, key, trust
        expiry = x509.load_pem_x509_certificate(chain).not_valid_after_utc
        SERVING_CERTIFICATE_EXPIRY.set(expiry.timestamp())
        self._say(f"serving with the certificate in {self._chain}, valid until {expiry:%Y-%m-%dT%H:%M:%SZ}")
        return Serving(context, trust)

    def _load(self, trust: Trust) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._chain, self._key)
        context.load_verify_locations(cadata=trust.authorities_pem)
        context.verify_mode = ssl.CERT_OPTIONAL
        # As in Go: every certificate in the bundle is an anchor, also an intermediate one.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    def _say(self, message: str) -> None:
        """Logs what is new, so that a wait is one line and not one a second."""
        if message != self._said:
            logger.info("event=certificate message=%s", message)
        self._said = message


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
