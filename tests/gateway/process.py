"""Runs a gateway as users do: `python -m conveyor_gateway` in its own process, on free ports."""

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from e2e.cluster.api import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
Json = dict[str, Any]


class GatewayProcess:
    """A gateway process. `with` starts it. Its log is kept, and shown if it does not start or end correctly.

    program: the module to run, if it is not the gateway itself.
    """

    def __init__(
        self,
        kubeconfig: Path,
        *arguments: str,
        max_open_files: int | None = None,
        program: str = "conveyor_gateway",
    ) -> None:
        self._max_open_files = max_open_files
        self._command = [
            *(sys.executable, "-m", program, "--kubeconfig", str(kubeconfig)),
            *("--host", "127.0.0.1", "--port", "0", "--admin-port", "0", *arguments),
        ]
        self._log_file = tempfile.NamedTemporaryFile("w+", prefix="gateway-", suffix=".log")  # noqa: SIM115  closed by kill
        self.port = self.admin_port = 0

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def start(self, timeout_seconds: float = 240) -> None:
        """Start the process. Returns when it is ready."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
        limit = [] if self._max_open_files is None else ["prlimit", f"--nofile={self._max_open_files}"]
        self.process = subprocess.Popen(
            [*limit, *self._command], cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=self._log_file
        )
        self._wait("the gateway's ports", self._find_ports, 60)
        self._wait("the gateway", lambda: self.admin("/readyz")[0] == 200, timeout_seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def log(self) -> list[str]:
        return Path(self._log_file.name).read_text().splitlines()

    def _find_ports(self) -> bool:
        found = re.search(r"serving port=(\d+) admin_port=(\d+)", "\n".join(self.log))
        if found:
            self.port, self.admin_port = int(found[1]), int(found[2])
        return found is not None

    def _wait(self, what: str, ready: Callable[[], bool], timeout_seconds: float) -> None:
        def check() -> None:
            assert self.process.poll() is None, "\n".join(self.log)

        wait_until(what, ready, check, timeout_seconds)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def terminate(self) -> None:
        self.process.terminate()

    def wait_ended(self) -> int:
        return self.process.wait(30)

    def kill(self) -> None:
        self.process.kill()
        self.wait_ended()
        self._log_file.close()

    def admin(self, path: str) -> tuple[int, str]:
        """Return status and text of a page of the admin port. The status is 0 while nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def knows_model(self, model: str) -> bool:
        """Return whether the root routes `model`. The request that tests this ends immediately."""
        body = json.dumps({"model": model}).encode()
        headers = {"X-Request-Timeout-Seconds": "0.01"}
        request = urllib.request.Request(f"{self.url}/v1/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60):
                return True
        except urllib.error.HTTPError as error:
            with error:
                return error.code != 404

    def demand(self, service: str) -> Json | None:
        """Return /demand's entry for `namespace/name`; None if there is none."""
        status, text = self.admin("/demand")
        assert status == 200, text
        content: Json = json.loads(text)
        found: Json | None = content["services"].get(service)
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a series in /metrics; 0 if there is none."""
        for family in text_string_to_metric_families(self.admin("/metrics")[1]):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return 0.0
