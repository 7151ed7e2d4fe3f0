"""Probes an engine and measures its memory while an attack runs. Used by `command`."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from tests.engine.processes import EngineServer

from conveyor_bench.processes import resident_mib


class Prober:
    """Sends a probe every 50 ms on a new connection and reads the size of the memory, in two threads."""

    def __init__(self, server: EngineServer) -> None:
        self._url = server.url
        self._pid, self._engine_pid = server.process.pid, server.engine_pid
        self._stop = threading.Event()
        self.slowest_seconds = 0.0
        self._before = self._memory()
        self.grown, self.engine_grown = 0.0, 0.0  # largest growth in MiB: all processes together; the engine process

    def __enter__(self) -> "Prober":
        self._threads = [threading.Thread(target=work) for work in (self._probe, self._watch)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _probe(self) -> None:
        while not self._stop.wait(0.05):
            began = time.monotonic()
            ok = httpx.get(f"{self._url}/livez", timeout=30).status_code == 200
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began if ok else 99.0)

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            others, engine = self._memory()
            engine -= self._before[1]
            self.grown = max(self.grown, others - self._before[0] + engine)
            self.engine_grown = max(self.engine_grown, engine)

    def _memory(self) -> tuple[float, float]:
        """Return the MiB of the engine process, and before it those of the API process and of all other children."""
        others = sum(_pss(pid) for pid in (self._pid, *_descendants(self._pid, self._engine_pid)))
        return others / 1024, resident_mib(self._engine_pid)


def _descendants(pid: int, without: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if int(word) != without:
                yield int(word)
            yield from _descendants(int(word), without)


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0
