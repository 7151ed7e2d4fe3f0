"""The certificate with which a port serves TLS, from a mounted Secret that cert-manager or somebody else renews.

New handshakes use a new certificate within seconds. Open connections go on, so that nobody notices the change.
"""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any, Final

from conveyor_process.settings import SettingsError

logger = logging.getLogger(__name__)

_HANDSHAKE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 1.0


class ServingCertificate:
    """The files `tls.crt` and `tls.key` of a folder. `context` always has the newest certificate that can be loaded."""

    def __init__(self, folder: Path) -> None:
        """Load the certificate. Raises SettingsError."""
        self._chain, self._key = folder / "tls.crt", folder / "tls.key"
        self.context = _build_context()
        try:
            self._loaded = self._read()
            self.context.load_cert_chain(self._chain, self._key)
        except OSError as error:  # ssl.SSLError is one
            raise SettingsError(f"cannot serve with {self._chain} and {self._key}: {error}") from error

    @property
    def options(self) -> dict[str, Any]:
        """The options of a `listening.Acceptor`."""
        return {"ssl": self.context, "ssl_handshake_timeout": _HANDSHAKE_SECONDS}

    async def follow(self) -> None:
        """Load each new certificate, until cancelled. If it cannot be loaded, the last one stays.

        The kubelet updates a mounted Secret by replacing a symbolic link, for which a watch on the files gets no event.
        """
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                found = self._read()
                if found == self._loaded:
                    continue
                self._loaded = found
                _build_context().load_cert_chain(self._chain, self._key)  # a failure would leave half a certificate
                self.context.load_cert_chain(self._chain, self._key)
            except OSError as error:
                logger.warning("event=certificate_refused consequence=the_last_one_stays error=%s", error)
            else:
                logger.info("event=certificate_loaded file=%s", self._chain)

    def _read(self) -> tuple[bytes, bytes]:
        return self._chain.read_bytes(), self._key.read_bytes()


def _build_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
