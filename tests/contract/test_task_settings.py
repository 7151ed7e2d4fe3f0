"""Checks that API and engine agree on the settings of each task."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from tests.api.builders import build_body

from conveyor_api import names
from conveyor_api.engine import Task
from conveyor_api.errors import InvalidResource
from conveyor_api.resource import InferenceService
from conveyor_engine.config.sources import parse_config
from conveyor_engine.config.task_settings import settle
from conveyor_engine.errors import ConfigError
from conveyor_operator.inferenceservice.desired import build_owner
from conveyor_operator.inferenceservice.manifests.config import build_engine_config
from conveyor_protocol.tasks import MODES, TASKS, Allows

LENGTHS = {"p50": 100, "p95": 200}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"mode {mode}": {"batching": {"mode": mode}} for mode in MODES},
    "workload of inputs": {"workload": {"inputTokens": LENGTHS}},
    "workload of inputs and outputs": {"workload": {"inputTokens": LENGTHS, "outputTokens": LENGTHS}},
    "latency": {"batching": {"objectives": {"latency": "1s"}}},
    "time to first token": {"batching": {"objectives": {"timeToFirstToken": "1s"}}},
    "time between tokens": {"batching": {"objectives": {"interTokenLatency": "1s"}}},
    "longest request": {"engine": {"maxModelLen": 4096}},
    "adapters": {"adapters": [{"name": "a", "uri": "pvc://models/a"}]},
    "several devices": {"engine": {"tensorParallelSize": 2}},
    "number of blocks": {"kvCache": {"blockBudget": 512}},
    "share of memory": {"kvCache": {"memoryPercent": 50}},
    "quantization": {
        "model": {**build_body()["spec"]["model"], "quantization": "INT8"},
        "engine": {"device": "Auto"},
    },
    "speculation": {"speculation": {"method": "NGram"}, "engine": {"device": "Auto"}},
    "type of the cache": {"kvCache": {"dtype": "FP8"}},
}
# The engine reports that it leaves devices unused: a pod may have several GPUs without the field. A cache's size, share
# and type have no effect on a task that turns out to have no cache.
ENGINE_ACCEPTS = {"several devices", "number of blocks", "share of memory", "type of the cache"}


def api_accepts(task: str, setting: dict[str, Any]) -> bool:
    try:
        InferenceService.parse(build_body(task=task, **setting))
    except InvalidResource:
        return False
    return True


def engine_accepts(task: str, setting: dict[str, Any], folder: Path) -> bool:
    """Return whether the engine accepts the setting of a service without `task`, whose model turns out to have it."""
    spec = InferenceService.parse(build_body(**setting)).spec
    text = build_engine_config(build_owner("default", "qwen", "1"), spec).text
    file = folder / names.ENGINE_CONFIG_KEY
    file.write_text(yaml.safe_dump({name: value for name, value in yaml.safe_load(text).items() if name != "task"}))
    try:
        settle(parse_config({"config": file}, {}), task.lower())
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("task", TASKS)
def test_api_and_engine_agree(task: str, setting: str, tmp_path: Path) -> None:
    accepts = engine_accepts(task, SETTINGS[setting], tmp_path)
    assert accepts == (api_accepts(task, SETTINGS[setting]) or setting in ENGINE_ACCEPTS)


@pytest.mark.parametrize(
    ("setting", "has"),
    [
        ({"padding": "real", "batching_mode": "static"}, lambda allows: allows.padding),
        ({"attention_backend": "torch"}, lambda allows: allows.attention),
    ],
)
@pytest.mark.parametrize("task", TASKS)
def test_the_engine_refuses_its_own_settings_by_the_table(
    task: str, setting: dict[str, str], has: Callable[[Allows], bool]
) -> None:
    config = parse_config({"model": "/model", **setting}, {})
    if has(TASKS[task]):
        assert settle(config, task.lower()).task == task.lower()
        return
    with pytest.raises(ConfigError, match="is set, but this model"):
        settle(config, task.lower())


def test_the_table_has_the_tasks_of_the_api() -> None:
    assert set(TASKS) == set(get_args(Task))
