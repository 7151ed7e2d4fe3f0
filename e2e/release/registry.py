"""Runs the registry on a port of localhost, from where containerd pulls by plain HTTP without configuration."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from e2e import kube
from e2e.cluster import programs
from e2e.release.tools import REGISTRY


@contextlib.contextmanager
def running_registry(folder: Path) -> Iterator[str]:
    """Yield the address of a registry that stores its blobs in `folder`."""
    storage = {"filesystem": {"rootdirectory": str(folder / "blobs")}}
    configuration, log = folder / "registry.yaml", folder / "registry.log"
    configuration.write_text(yaml.safe_dump({"version": 0.1, "storage": storage, "http": {"addr": "localhost:0"}}))
    with log.open("w") as output:
        process = programs.start(REGISTRY, "serve", configuration, stdout=output, stderr=output)
    try:
        found = kube.wait_until("the registry", lambda: re.search(r"listening on \S+:(\d+)", log.read_text()))
        yield f"localhost:{found[1]}"
    finally:
        process.terminate()
        process.wait()
