"""A model hub on this machine that serves the demo model under a name that the documentation uses."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e.demo_model import demo_model_directory
from e2e.hub.server import Faults, Hub
from e2e.hub_address import host_address

REPOSITORY = "Qwen/Qwen3-0.6B"


@contextmanager
def running_hub(folder: Path, faults: Faults | None = None, token: str | None = None) -> Iterator[Hub]:
    """Serve the hub's protocol on a free port that pods can reach. `REPOSITORY` is the demo model."""
    model = folder / REPOSITORY
    model.parent.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        model.symlink_to(demo_model_directory())
    hub = Hub((host_address(), 0), folder, token, faults)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def from_hub(hub: Hub, body: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest of the documentation, changed to run here: this hub, a CPU, and the demo model's sizes."""
    spec = dict(body["spec"])
    environment = [{"name": "HF_ENDPOINT", "value": hub.url}]
    spec["engine"] = {**spec.get("engine", {}), "device": "Auto", "maxModelLen": 512}
    spec["pod"] = {"env": environment}
    spec.setdefault("kvCache", {"blockBudget": 4096})
    spec["resources"] = {"requests": {"cpu": "100m"}, "limits": {"nvidia.com/gpu": 1, "cpu": 1}}
    return {**body, "spec": spec}
