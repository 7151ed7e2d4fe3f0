"""Tests that the rendered pods do not change, because an operator that renders them differently restarts every engine.

CHANGELOG.md must mention such a change.
`python -m tests.operator.inferenceservice.test_rendered_pods` writes `rendered/` anew.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api.builders import build_full_body
from tests.operator.builders import build_one

RENDERED = Path(__file__).parent / "rendered"
SPECS: dict[str, dict[str, Any]] = {
    "plain": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
    "volume": {"model": {"uri": "pvc://weights/a/b"}, "autoscaling": {"maxReplicas": 3}},
    "full": {**build_full_body()["spec"], "adapters": []},
    "adapters": {"model": {"uri": "pvc://weights/a"}, "adapters": build_full_body()["spec"]["adapters"]},
    "vllm": {
        "runtime": "VLLM",
        "engine": {"image": "vllm/vllm-openai:v0.11.0", "maxModelLen": 8192, "args": ["--enable-lora"]},
        "batching": {"maxBatchSize": 64, "maxBatchTokens": 4096},
        "kvCache": {"memoryPercent": 90},
        "resources": {"limits": {"nvidia.com/gpu": 1}},
    },
}


def render(spec: dict[str, Any]) -> str:
    """Return the pod template, and the file that it mounts."""
    template = build_one("Deployment", **spec)["spec"]["template"]
    engine_yaml: str = build_one("ConfigMap", **spec)["data"]["engine.yaml"]
    return f"{yaml.safe_dump(template)}---\n{engine_yaml}"


@pytest.mark.parametrize("name", SPECS)
def test_the_pods_are_rendered_as_by_the_last_release(name: str) -> None:
    assert render(SPECS[name]) == (RENDERED / f"{name}.yaml").read_text(), "an upgrade would restart every engine"


if __name__ == "__main__":
    for name, spec in SPECS.items():
        (RENDERED / f"{name}.yaml").write_text(render(spec))
