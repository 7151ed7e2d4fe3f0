"""How the gateway reaches engines: by plain HTTP, or by TLS with the authorities of a file. For `session`, `fetching`.

The connection goes to the pod's address, and the engine's certificate must be for its Service (`find_host`).
"""

import ssl
from pathlib import Path
from typing import Any, Final

from yarl import URL

from conveyor_gateway.engines.connection import Connector
from conveyor_gateway.engines.headers import find_host
from conveyor_process.followed_files import FollowedFiles
from conveyor_process.settings import SettingsError


class EngineTls:
    """The authorities that verify engines. `context` always has the newest ones that can be loaded.

    `connector` has the connections to all engines. Requests and pages share them, because a handshake is expensive.
    """

    def __init__(self, file: Path) -> None:
        """Load the authorities, in the event loop. Raises SettingsError."""
        self._file = file
        self.connector: Final = Connector()
        try:
            files = FollowedFiles("authorities", (file,), self._load)
        except OSError as error:
            raise SettingsError(f"cannot verify engines with {file}: {error}") from error
        self.follow: Final = files.follow

    def _load(self) -> None:
        self.context = ssl.create_default_context(cafile=self._file)


def build_url(tls: EngineTls | None, address: str, path: str) -> URL:
    return URL(f"{'http' if tls is None else 'https'}://{address}{path}", encoded=True)


def build_options(tls: EngineTls | None, service: str, address: str) -> dict[str, Any]:
    """Return aiohttp's options for a request to an engine of `service`, `namespace/name`."""
    if tls is None:
        return {}
    return {"ssl": tls.context, "server_hostname": find_host(service, address).rpartition(":")[0]}
