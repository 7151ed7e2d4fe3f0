"""What several of these tests start from."""

from pathlib import Path

import pytest
import yaml


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A kubeconfig without a server behind it: a process that starts with it lives, and logs that it waits."""
    entries = {
        "clusters": [{"name": "a", "cluster": {"server": "http://127.0.0.1:9"}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "users": [{"name": "a", "user": {}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "a", **entries}))
    return path
