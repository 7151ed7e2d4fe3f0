"""Whether this gateway should be sent requests: what /readyz and /demand say about it.

Fed by `watch` (through its states), by `server` (draining) and by `self_check` (whether clients are answered).
Kubernetes asks /readyz every few seconds.

A gateway that has lost the API server stays ready: it serves on with what it knew last, engines that are gone are
noticed by their connections, and if all gateways left their Service because the API server is away, an outage of the
control plane would become one of the service. It says so in the body of /readyz, in a metric and in the log.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from conveyor_kube.watch import MAX_SILENCE_SECONDS, WatchState


class Readiness:
    """Told by `server` which watches there are; `now_seconds` is their clock."""

    def __init__(
        self,
        watches: Sequence[WatchState],
        now_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watches = watches
        self._now_seconds = now_seconds
        self.draining = False
        self.answers_clients = True  # on the public port

    @property
    def synced(self) -> bool:
        """Whether every watch has listed its collection once."""
        return all(watch.synced for watch in self._watches)

    def problems(self) -> list[str]:
        """Why no request should come here; empty: ready."""
        missing = [f"not synced: {watch.name}" for watch in self._watches if not watch.synced]
        silent = ["the public port answers no clients"] * (not self.answers_clients)
        return ["draining"] * self.draining + silent + missing

    def warnings(self) -> list[str]:
        """Problems with which this gateway still serves."""
        return [
            f"stale: {name}: the API server is silent for {seconds:.0f} s; serving with what was known then"
            for name, seconds in self.silences()
            if seconds > MAX_SILENCE_SECONDS
        ]

    def silences(self) -> Iterator[tuple[str, float]]:
        """Each watch that has synced, and the seconds since it last heard the API server."""
        now = self._now_seconds()
        for watch in self._watches:
            if watch.synced:
                yield watch.name, now - watch.heard_at
