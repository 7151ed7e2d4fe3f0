"""The certificate with which a port serves TLS, from a mounted Secret that cert-manager or somebody else renews.

New handshakes use a new certificate within seconds. Open connections go on, so that nobody notices the change.
"""

import ssl
from pathlib import Path
from typing import Any, Final

from conveyor_process.followed_files import FollowedFiles
from conveyor_process.settings import SettingsError

_HANDSHAKE_SECONDS: Final = 5.0


class ServingCertificate:
    """The files `tls.crt` and `tls.key` of a folder. `context` always has the newest certificate that can be loaded."""

    def __init__(self, folder: Path) -> None:
        """Load the certificate. Raises SettingsError."""
        self._chain, self._key = folder / "tls.crt", folder / "tls.key"
        self.context = _build_context()
        try:
            files = FollowedFiles("certificate", (self._chain, self._key), self._load)
        except OSError as error:
            raise SettingsError(f"cannot serve with {self._chain} and {self._key}: {error}") from error
        self.follow: Final = files.follow

    @property
    def options(self) -> dict[str, Any]:
        """The options of a `listening.Acceptor`."""
        return {"ssl": self.context, "ssl_handshake_timeout": _HANDSHAKE_SECONDS}

    def _load(self) -> None:
        _build_context().load_cert_chain(self._chain, self._key)  # a failure would leave half a certificate
        self.context.load_cert_chain(self._chain, self._key)


def _build_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
