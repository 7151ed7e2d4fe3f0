"""OpenTelemetry's collector, with the receiver of OTLP and an exporter to a file. Built once, by its own builder."""

import shutil
import textwrap
from pathlib import Path

from e2e import go_module
from e2e.cluster import programs
from e2e.cluster.paths import CACHE
from e2e.cluster.progress import announced

VERSION = "0.165.0"
FOLDER = CACHE / f"otelcol-{VERSION}"
PROGRAM = FOLDER / "otelcol"
_BUILDER = f"go.opentelemetry.io/collector/cmd/builder@v{VERSION}"
_CONTENT = f"""
    dist: {{name: otelcol, output_path: .}}
    receivers:
      - gomod: go.opentelemetry.io/collector/receiver/otlpreceiver v{VERSION}
    exporters:
      - gomod: github.com/open-telemetry/opentelemetry-collector-contrib/exporter/fileexporter v{VERSION}
"""


def build() -> Path:
    """Build the collector and return its path. All else that the build needs is deleted afterwards."""
    if not PROGRAM.exists():
        partial = FOLDER / "partial"
        source = partial / "source"
        source.mkdir(parents=True, exist_ok=True)
        (source / "builder.yaml").write_text(textwrap.dedent(_CONTENT))
        environment = go_module.build_environment(partial / "modules")
        environment |= {"GOCACHE": str(partial / "build"), "GOBIN": str(partial / "bin"), "CGO_ENABLED": "0"}
        with announced(f"otelcol {VERSION}: building it, which takes a core some minutes and 2 GB meanwhile"):
            programs.run("go", "install", "-trimpath", _BUILDER, env=environment, check=True)
            command = (partial / "bin" / "builder", "--config=builder.yaml")
            programs.run(*command, cwd=source, env=environment, check=True)
        (source / "otelcol").rename(PROGRAM)
        shutil.rmtree(partial)
    return PROGRAM


if __name__ == "__main__":
    build()
