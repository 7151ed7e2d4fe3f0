"""Loads files of a mounted volume again when somebody renews them. Used by `serving_certificate`, `engines.tls` and
`conveyor_kube.authorities`."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 1.0


class FollowedFiles:
    """Files that belong together, such as a certificate and its key. `what` they are is the event's name in the log."""

    def __init__(self, what: str, files: tuple[Path, ...], load: Callable[[], None]) -> None:
        """Load the files. Raises OSError, which ssl.SSLError is too, as `load` does if it cannot load them."""
        self._what, self._files, self._load = what, files, load
        self._loaded = self._read()
        load()

    async def follow(self) -> None:
        """Load each new content, until cancelled. One that cannot be loaded is tried again, and logged once.

        The kubelet updates a mounted Secret by replacing a symbolic link, for which a watch on the files gets no event.
        """
        refused: tuple[tuple[bytes, ...], str] | None = None
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            found: tuple[bytes, ...] = ()
            try:
                found = self._read()
                if found != self._loaded:
                    self._load()
                    self._loaded = found
                    logger.info("event=%s_loaded file=%s", self._what, self._files[0])
                refused = None
            except OSError as error:
                if refused != (found, str(error)):
                    logger.warning("event=%s_refused consequence=the_last_stays error=%s", self._what, error)
                refused = found, str(error)

    def _read(self) -> tuple[bytes, ...]:
        return tuple(file.read_bytes() for file in self._files)
