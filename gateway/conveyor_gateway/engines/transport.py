"""How requests reach engines: by plain HTTP or TLS, and with the gateway's token. For `session` and `fetching`.

The connection goes to the pod's address, and the engine's certificate must be for its Service (`find_host`).
"""

import ssl
from pathlib import Path
from typing import Any, Final

import aiohttp
from yarl import URL

from conveyor_gateway.engines.connection import Connector
from conveyor_gateway.engines.headers import find_host
from conveyor_gateway.engines.tokens import EngineTokens
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


class Transport:
    """The way to all engines: TLS if `tls` has authorities, and `tokens` for engines that answer only gateways."""

    def __init__(self, tls: EngineTls | None = None) -> None:
        self._tls = tls
        self.tokens: Final = EngineTokens()

    def open_session(self, **options: Any) -> aiohttp.ClientSession:
        """Return a session for requests to engines. With TLS, it shares its connections, and leaves them open."""
        tls = self._tls
        own: dict[str, Any] = {
            "connector": Connector() if tls is None else tls.connector,
            "connector_owner": tls is None,
            "cookie_jar": aiohttp.DummyCookieJar(),
            "auto_decompress": False,
            "middlewares": (self.tokens,),
        }
        return aiohttp.ClientSession(**own | options)

    def build_url(self, address: str, path: str) -> URL:
        return URL(f"{'http' if self._tls is None else 'https'}://{address}{path}", encoded=True)

    def build_options(self, service: str, address: str) -> dict[str, Any]:
        """Return aiohttp's options for a request to an engine of `service`, `namespace/name`."""
        if self._tls is None:
            return {}
        return {"ssl": self._tls.context, "server_hostname": find_host(service, address).rpartition(":")[0]}


PLAIN: Final = Transport()
