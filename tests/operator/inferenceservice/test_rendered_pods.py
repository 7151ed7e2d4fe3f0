"""Tests that the rendered pods do not change, because an operator that renders them differently restarts every engine.

CHANGELOG.md must mention such a change.
`python -m tests.operator.inferenceservice.test_rendered_pods` writes `rendered/` anew.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api.builders import build_full_body
from tests.operator.builders import build_file, build_one

from conveyor_api.spec import InferenceServiceSpec
from e2e.cluster.paths import REPOSITORY

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
    return f"{yaml.safe_dump(template)}---\n{build_file('engine.yaml', **spec)}"


@pytest.mark.parametrize("name", SPECS)
def test_the_pods_are_rendered_as_by_the_last_release(name: str) -> None:
    assert render(SPECS[name]) == (RENDERED / f"{name}.yaml").read_text(), "an upgrade would restart every engine"


# A spec, and a change to each field. `runtime: VLLM` needs an image, and `speculation` a CPU.
PLAIN: dict[str, Any] = {"engine": {"image": "example/engine:1", "device": "Auto"}}
CHANGES: dict[str, Any] = {
    "model": {"uri": "hf://example/other"},
    "adapters": [{"name": "a", "uri": "hf://example/adapter"}],
    "engine": {"image": "example/engine:2"},
    "batching": {"maxBatchSize": 4},
    "kvCache": {"blockSize": 32},
    "task": "Embed",
    "runtime": "VLLM",
    "workload": {"inputTokens": {"p50": 100, "p95": 200}, "outputTokens": {"p50": 100, "p95": 200}},
    "speculation": {"method": "NGram"},
    "requestTimeout": "9m",
    "drain": {"timeout": "9s"},
    "resources": {"limits": {"memory": "9Gi"}},
    "pod": {"priorityClassName": "high"},
    "replicas": 3,
    "autoscaling": {"maxReplicas": 3},
    "rollout": {"maxSurge": 2},
    "listed": True,
    "access": {"mode": "Required"},
    "metadata": {"labels": {"cost-center": "7"}},
    "queue": {"timeout": "9s", "maxRequests": 9, "classes": [{"name": "chat", "level": 1}]},
}


def test_the_page_says_which_changes_replace_pods() -> None:
    page = (REPOSITORY / "docs" / "operations.md").read_text()
    table = page.partition("| a change to | replaces pods |\n")[2].splitlines()[1:5]
    yes, _, some, no = (
        {name.partition(".")[0].partition("[")[0] for name in re.findall(r"`([^`]+)`", row)} for row in table
    )
    assert [row.rpartition("| ")[2] for row in (table[0], table[3])] == ["yes |", "no |"]
    assert some == {"adapters"}
    parts = {"cache", "level", "maxShare"}  # of a field that is named in the same row
    fields = {field.alias for field in InferenceServiceSpec.model_fields.values()} - {"profile"}
    assert (yes | some | no) - parts == CHANGES.keys() == fields
    replacing = {name for name, change in CHANGES.items() if render(PLAIN | {name: change}) != render(PLAIN)}
    assert replacing == (yes | some) - parts - {"queue"}
    share = {"name": "chat", "level": 1, "maxShare": 50}
    queues = [{"classes": [share]}, {"classes": [share | {"level": 2}]}]
    assert len({render(PLAIN), *(render(PLAIN | {"queue": queue}) for queue in queues)}) == 3


if __name__ == "__main__":
    for name, spec in SPECS.items():
        (RENDERED / f"{name}.yaml").write_text(render(spec))
