"""How the gateway reaches engines: by plain HTTP, or by TLS with the authorities of a file. For `session`, `fetching`.

The connection goes to the pod's address, and the engine's certificate must be for its Service (`find_host`).
"""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any, Final

from yarl import URL

from conveyor_gateway.engines.headers import find_host
from conveyor_process.settings import SettingsError

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 1.0


class EngineTls:
    """The authorities that verify engines. `context` always has the newest ones that can be loaded."""

    def __init__(self, file: Path) -> None:
        """Load the authorities. Raises SettingsError."""
        self._file = file
        try:
            self._loaded = file.read_bytes()
            self.context = ssl.create_default_context(cafile=file)
        except OSError as error:  # ssl.SSLError is one
            raise SettingsError(f"cannot verify engines with {file}: {error}") from error

    async def follow(self) -> None:
        """Load the authorities again whenever the file changes, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                found = self._file.read_bytes()
                if found == self._loaded:
                    continue
                self._loaded = found
                self.context = ssl.create_default_context(cafile=self._file)
            except OSError as error:
                logger.warning("event=authorities_refused consequence=the_last_ones_stay error=%s", error)
            else:
                logger.info("event=authorities_loaded file=%s", self._file)


def build_url(tls: EngineTls | None, address: str, path: str) -> URL:
    return URL(f"{'http' if tls is None else 'https'}://{address}{path}", encoded=True)


def build_options(tls: EngineTls | None, service: str, address: str) -> dict[str, Any]:
    """Return aiohttp's options for a request to an engine of `service`, `namespace/name`."""
    if tls is None:
        return {}
    return {"ssl": tls.context, "server_hostname": find_host(service, address).rpartition(":")[0]}
