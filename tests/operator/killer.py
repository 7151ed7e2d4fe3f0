"""Runs operators each of which is killed at one of its writes, until the last one has nothing left to do."""

import threading

from tests.operator.api_proxy import Call
from tests.operator.stage import Stage, wait_until


class Killer:
    """Kills the operator at its nth write from now, before the write reaches the API server or right after."""

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
    """Run one operator after the other, each of which is killed at its first new write. Returns their number.

    A new operator applies every child once, so its nth life gets to its nth write.
    """
    for nth in range(1, 60):
        killer = Killer(stage, nth, after)
        life = stage.start()
        wait_until("a write, or peace", lambda: killer.struck.is_set() or is_quiet(stage))  # noqa: B023
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
