"""Operators that are each killed at one of their writes, until the last one has nothing left to do."""

import threading

from tests.operator.api_proxy import Call
from tests.operator.stage import Stage, wait_until


class Killer:
    """Kills the operator at its nth write from now: before the API server hears of it, or right after."""

    def __init__(self, stage: Stage, nth: int, after: bool) -> None:
        self._stage = stage
        self._nth = nth
        self._after = after
        self._writes = 0
        self.struck = threading.Event()
        stage.proxy.before = self._before

    def _before(self, call: Call) -> None:
        if not call.is_write or self.struck.is_set():
            return
        self._writes += 1
        if self._writes == self._nth + int(self._after):
            self.struck.set()
            self._stage.proxy.sever()
            raise ConnectionError("the operator is dead")


def live_write_by_write(stage: Stage, *, after: bool) -> int:
    """One life after the other, each killed at its first write that is new; returns how many it took.

    A new operator applies every child once, so its nth life gets to its nth write.
    """
    for nth in range(1, 60):
        killer = Killer(stage, nth, after)
        life = stage.start()
        wait_until("a write, or peace", lambda: killer.struck.is_set() or is_quiet(stage), 60)  # noqa: B023
        if not killer.struck.is_set():
            life.stop()
            stage.proxy.before = lambda call: None
            return nth
        stage.kill(life)
    raise AssertionError("it never comes to an end")


def is_quiet(stage: Stage) -> bool:
    observed = stage.space.need("InferenceService", "qwen")
    if (observed.get("status") or {}).get("observedGeneration") != observed["metadata"]["generation"]:
        return False
    try:
        stage.proxy.wait_quiet(1.5, timeout=1.6)
    except TimeoutError:
        return False
    return True
