"""Follows the certificates of the TLS handshake while the server runs. Used by `listener`.

The serving certificate comes from a mounted Secret, which the operator fills and rotates. The authority for the front
proxy's certificate comes from `auth.Trust`.

The handshake succeeds for a caller without a certificate, so that `auth` can respond with 401. It fails for a caller
with a foreign certificate, because Python's `ssl` verifies any certificate that it requests.
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
    """A context for a listening socket, and the trust with which it was built."""

    context: ssl.SSLContext
    trust: Trust


class Certificates:
    """The files `tls.crt` and `tls.key` in a folder, and the latest trust. `trust` is None until it is known."""

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
        """Yield the certificate to serve with: when files and trust are known, and after each change, until cancelled.

        The files are read once a second. The kubelet updates a mounted Secret by replacing a symbolic link, and a watch
        on the files would get no event for that.
        """
        while True:
            self._trust_changed.clear()
            if serving := self._load_new():
                yield serving
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._trust_changed.wait()

    def _load_new(self) -> Serving | None:
        """Return the new certificate. If it is unchanged or cannot be loaded, return None: the current one stays."""
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
        # As in Go, every certificate in the bundle is a trust anchor, including intermediate ones.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    def _say(self, message: str) -> None:
        """Log a message if it differs from the last one, so that a wait is logged once and not every second."""
        if message != self._said:
            logger.info("event=certificate message=%s", message)
        self._said = message


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
