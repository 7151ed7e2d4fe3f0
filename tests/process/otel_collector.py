"""Runs the OpenTelemetry Collector as a process. It accepts OTLP over HTTP, and writes to a file what it accepts."""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest
from tests.process.collector import AnyCollector, Collector

from e2e import otel_collector
from e2e.cluster.api import wait_until


class OpenTelemetryCollector(AnyCollector):
    """Listens on a free port of 127.0.0.1 in `with`."""

    def __enter__(self) -> Self:
        program = otel_collector.build()
        self._folder = tempfile.TemporaryDirectory(prefix="otel-collector-")
        folder = Path(self._folder.name)
        self._file, self._log = folder / "spans", folder / "log"
        settings = folder / "settings.yaml"
        settings.write_text(json.dumps(_build_settings(self._file)))
        with self._log.open("w") as log:
            self._process = subprocess.Popen([program, "--config", settings], stdout=log, stderr=log)
        try:
            wait_until("the collector", self._is_ready, self._check)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _check(self) -> None:
        assert self._process.poll() is None, self._log.read_text()

    def _is_ready(self) -> bool:
        log = self._log.read_text()
        if (found := re.search(r'Starting HTTP server.*"endpoint": "([^"]+)"', log)) is None:
            return False
        self.url = f"http://{found[1]}"
        return "Everything is ready" in log

    def read(self) -> list[bytes]:
        """Return what the file has: each request after its length, which is a big-endian number of 4 bytes."""
        self._check()
        content, received = self._file.read_bytes(), []
        while len(content) >= 4 + (length := int.from_bytes(content[:4])):
            received.append(content[4 : 4 + length])
            content = content[4 + length :]
        return received


def _build_settings(file: Path) -> dict[str, object]:
    return {
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": "127.0.0.1:0"}}}},
        "exporters": {"file": {"path": str(file), "format": "proto", "flush_interval": "50ms"}},
        "service": {
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["file"]}},
        },
    }


# For fixtures: the second one runs at night, because building it takes minutes.
COLLECTORS: Final = [Collector, pytest.param(OpenTelemetryCollector, marks=pytest.mark.nightly)]
