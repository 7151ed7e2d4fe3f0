"""Decides whether this gateway should get requests, for /readyz and all pages that need the cluster's state.

The inputs come from the states of the watches, from `server` (draining) and from `self_check` (whether the public port
responds). Kubernetes probes /readyz every few seconds.

A gateway that cannot reach the API server stays ready and uses the last known state. It detects removed engines by
failed connections. If all gateways became unready instead, an outage of the control plane would be an outage of the
services too. The body of /readyz, a metric and the log report the stale state.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from conveyor_kube.watch import MAX_SILENCE_SECONDS, WatchState


@dataclass(slots=True)
class Readiness:
    """The inputs of the decision. `now_seconds` is the clock of the watches.

    A new gateway is not ready until the operator has claimed the served names. Until then, it could not route requests
    at the root by the names of models. Meanwhile, gateways of earlier releases, which need no claims, route these
    requests.
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
        """Return why this gateway should not get requests; empty if it is ready."""
        missing = [f"not synced: {watch.name}" for watch in self.watches if not watch.synced]
        if not missing and not self._find_names_claimed():
            missing = ["waiting for the operator, which claims the names of services when it first runs"]
        silent = ["the public port does not answer"] * (not self.answers_clients)
        return ["draining"] * self.draining + silent + missing

    def _find_names_claimed(self) -> bool:
        self._names_claimed = self._names_claimed or self.are_names_claimed()
        return self._names_claimed

    def warnings(self) -> list[str]:
        """Return the problems that do not make this gateway unready."""
        return [
            f"stale: {name}: no data from the API server for {seconds:.0f} s; serving with the last known state"
            for name, seconds in self.silences()
            if seconds > MAX_SILENCE_SECONDS
        ]

    def silences(self) -> Iterator[tuple[str, float]]:
        """Yield each synced watch with the seconds since the API server last sent it data."""
        now = self.now_seconds()
        for watch in self.watches:
            if watch.synced:
                yield watch.name, now - watch.received_at
