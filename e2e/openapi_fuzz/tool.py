"""Installs schemathesis and runs it on one route. Used by `__main__`."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from e2e.cluster import programs
from e2e.cluster.paths import CACHE
from e2e.openapi_fuzz.documents import Route, restrict

PACKAGE = "schemathesis==4.32.5"
FOLDER = CACHE / "openapi-fuzz"
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
# For the engine's own document: also checks headers, wrong requests, and methods that the document does not list.
OWN_CHECKS = (
    *CHECKS, "response_headers_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance"
)  # fmt: skip
# A client may set a deadline that passes (504), and requests may find the engine full (429, 503).
_EXPECTED = ["2XX", "3XX", "4XX", 503, 504]


@dataclass(slots=True)
class Result:
    """What a run found on one route of one engine."""

    engine: str
    route: str
    cases: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def install() -> Path:
    """Return the program. Its environment is made once for each version."""
    key = hashlib.sha256(f"{sys.version}\0{PACKAGE}".encode()).hexdigest()[:8]
    folder = FOLDER / f"environment-{key}"
    if not (folder / ".complete").exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        programs.run_quietly("uv", "venv", "--quiet", "--clear", "--python", sys.executable, folder)
        programs.run_quietly("uv", "pip", "install", "--quiet", "--python", folder / "bin" / "python", PACKAGE)
        (folder / ".complete").touch()
    return folder / "bin" / "schemathesis"


@dataclass(frozen=True, slots=True)
class Tool:
    """Runs schemathesis against one engine."""

    program: Path
    engine: str
    url: str
    authorization: str | None
    document: dict[str, Any]
    folder: Path  # of the configuration, the logs and the reports
    checks: Sequence[str]
    request_seconds_max: float
    route_seconds_max: float

    def configure(self, parameters: dict[str, list[str]], share: float) -> None:
        """Write the configuration.

        `parameters`: the values of each path parameter for this share of the requests. Other requests use random ones.
        """
        lines = [f'"path.{name}" = {{dictionary = "{name}", probability = {share}}}' for name in parameters]
        text = f"[parameters]\n{chr(10).join(lines)}\n[checks.not_a_server_error]\n"
        text += f"expected-statuses = {json.dumps(_EXPECTED)}\n"
        # A header that the document does not list is no error.
        text += "[generation]\nallow-extra-parameters = false\n"
        text += "".join(f"[dictionaries.{name}]\nvalues = {json.dumps(each)}\n" for name, each in parameters.items())
        (self.folder / "schemathesis.toml").write_text(text)

    def run(self, route: Route, cases: int) -> Result:
        """Run about this many generated cases, and those for the limits of each field."""
        name = f"{route.method}{route.path.replace('/', '_')}"
        return self._run(name, str(route), [route], "examples,coverage,fuzzing", cases)

    def run_without_bodies(self, routes: Sequence[Route], cases: int) -> Result:
        """Run the same for each of the routes, which have no bodies, with one result for all."""
        return self._run("bodiless", f"{len(routes)} routes without a body", routes, "examples,coverage,fuzzing", cases)

    def run_briefly(self, routes: Sequence[Route], cases: int) -> Result:
        """Run about this many generated cases for each of the routes, with one result for all."""
        return self._run("others", f"{len(routes)} other routes", routes, "fuzzing", cases)

    def _run(self, name: str, title: str, routes: Sequence[Route], phases: str, cases: int) -> Result:
        report, document, begin = self.folder / f"{name}.json", self.folder / f"{name}.openapi.json", time.monotonic()
        report.unlink(missing_ok=True)
        document.write_text(json.dumps(restrict(self.document, routes)))
        with (self.folder / f"{name}.log").open("w") as log:
            process = programs.start(
                self.program, "--config-file", "schemathesis.toml", "run", document, "--url", self.url,
                *(f"--include-name={route}" for route in routes),
                *(("--header", f"Authorization: {self.authorization}") if self.authorization else ()),
                "--checks", ",".join(self.checks),
                "--phases", phases, "--max-examples", str(cases), "--continue-on-failure",
                "--request-timeout", f"{self.request_seconds_max:g}", "--suppress-health-check", "all",
                "--generation-database", "none", "--no-color", "--warnings", "off", "--no-shrink",
                "--output-truncate", "false", "--output-sanitize", "false", "--report-json-path", report,
                cwd=self.folder, stdout=log, stderr=log,
            )  # fmt: skip
            is_in_time = _wait(process, self.route_seconds_max)
        result = Result(self.engine, title, seconds=round(time.monotonic() - begin, 1))
        try:
            _read(json.loads(report.read_text()), result)
        except (FileNotFoundError, json.JSONDecodeError):  # it opens the file at its start
            result.failures.append(f"schemathesis wrote no whole report: see {self.folder / name}.log")
        if not is_in_time:
            result.failures.append(f"not all cases ran within {self.route_seconds_max:g} s")
        return result


def _wait(process: "subprocess.Popen[Any]", seconds: float) -> bool:
    """Wait for the end of a process; return False if it had to be interrupted."""
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it writes its report
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return False


def _read(report: dict[str, Any], result: Result) -> None:
    result.cases = report["test_cases"]["generated"]
    result.failures += [f"{each['title']} ({each['count']})" for each in report["failures"]]
    result.failures += [str(each.get("title") or each) for each in report["errors"]]
    if not report["operations"]["tested"]:
        result.failures.append("the route was not tested")
