"""Whether this gateway should be sent requests: what /readyz and /demand report.

Fed by `watch` (through its states), by `server` (draining) and by `self_check` (whether clients are answered).
Kubernetes probes /readyz every few seconds.

A gateway that has lost the API server stays ready: it serves on with what it knew last, engines that are gone are
noticed by their connections, and if all gateways left their Service because the API server is away, an outage of the
control plane would become one of the service. The body of /readyz, a metric and the log report it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from conveyor_kube.watch import MAX_SILENCE_SECONDS, WatchState


@dataclass(slots=True)
class Readiness:
    """`now_seconds` is the clock of the watches.

    Before the names of services are claimed, a new gateway would not know those that an older one served by their age.
    """

    watches: Sequence[WatchState]
    now_seconds: Callable[[], float] = time.monotonic
    are_names_claimed: Callable[[], bool] = lambda: True
    draining: bool = False
    answers_clients: bool = True  # on the public port
    _names_claimed: bool = False

    @property
    def synced(self) -> bool:
        """Whether every watch has listed its collection once, and the operator has once claimed all names."""
        return all(watch.synced for watch in self.watches) and self._find_names_claimed()

    def problems(self) -> list[str]:
        """Why no request should come here; empty: ready."""
        missing = [f"not synced: {watch.name}" for watch in self.watches if not watch.synced]
        if not missing and not self._find_names_claimed():
            missing = ["waiting for the operator, which claims the names of services when it first runs"]
        silent = ["the public port does not answer"] * (not self.answers_clients)
        return ["draining"] * self.draining + silent + missing

    def _find_names_claimed(self) -> bool:
        self._names_claimed = self._names_claimed or self.are_names_claimed()
        return self._names_claimed

    def warnings(self) -> list[str]:
        """Problems with which this gateway still serves."""
        return [
            f"stale: {name}: no data from the API server for {seconds:.0f} s; serving with the last known state"
            for name, seconds in self.silences()
            if seconds > MAX_SILENCE_SECONDS
        ]

    def silences(self) -> Iterator[tuple[str, float]]:
        """Each watch that has synced, and the seconds since the API server last sent it something."""
        now = self.now_seconds()
        for watch in self.watches:
            if watch.synced:
                yield watch.name, now - watch.heard_at
